"""Every family: rows packed or sharing a prompt give the outputs and gradients of rows alone."""

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten

from mlxft.config.schema import AdapterConfig
from mlxft.errors import InputError
from mlxft.layouts.arrange import LAYOUTS, Arranger, Group
from mlxft.layouts.cache import TrainingCache
from mlxft.models.decoder import DecoderView, view
from mlxft.models.families import UNTRAINABLE
from mlxft.models.families.whole import PADDED_ONLY
from mlxft.models.load import load
from mlxft.models.lora import apply_adapter
from mlxft.segmented.gradients import Gradient, hidden_states
from mlxft.training.objectives.common import HeadPlan
from tests.devices import SLACK
from tests.gradients import added_up, difference
from tests.tiny_models import FAMILIES, MORE_FAMILIES, PADDED_FAMILIES, VOCAB_SIZE, make_model

CLOSE = 1e-5 * SLACK  # float32, sums in another order: rounding of the largest entry

# Families whose gradients are compared: each has code, a view, or a kind of layer of its own.
TRAINED = [
    "llama", "mistral", "qwen2", "qwen3", "qwen3_moe", "gemma", "gemma3_text", "gemma4_text", "qwen3_5",
    "qwen3_next", "lfm2"
]  # fmt: skip
WINDOWED = {"mistral", "gemma3_text", "gemma4_text", "gemma3", "gemma4", "olmo3"}


def random_tokens(length: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(3, VOCAB_SIZE, length).astype(np.int32)


# Prompts of 19 and 11 positions, where windows are of 8; a branch of one token, and two that are the same.
GROUPS = [
    Group(random_tokens(19, 0), (random_tokens(5, 1), random_tokens(1, 2), random_tokens(12, 3))),
    Group(random_tokens(11, 4), (random_tokens(4, 5), random_tokens(4, 5))),
    Group(random_tokens(0, 6), (random_tokens(3, 7),)),
]
ROWS = [np.concatenate([group.prompt, branch]) for group in GROUPS for branch in group.branches]
WEIGHTS = [np.random.default_rng(len(row)).normal(size=len(row) - 1).astype(np.float32) for row in ROWS]


class Scored:
    """The sum of each row's log-probabilities, every token with a weight of its own."""

    head = HeadPlan("full")

    def token_weights(self, inputs):
        return None

    def loss(self, logps, inputs):
        return (logps * inputs["weights"]).sum(), {}


def forwarded(layout: str, groups: list[Group], first: int = 0, multiple: int = 1):
    """The arrays of one forward of `groups`, whose first row is number `first`, and its layout."""
    arranged = Arranger(layout, multiple)(groups)
    num_rows = len(arranged.places)
    arrays = {
        "tokens": arranged.tokens,
        "index": np.concatenate(arranged.places),
        "targets": np.concatenate([row[1:] for row in ROWS[first : first + num_rows]]),
        "weights": np.concatenate(WEIGHTS[first : first + num_rows]),
    }
    return {name: mx.array(array) for name, array in arrays.items()}, arranged.layout


def alone() -> list:
    """Each row in a forward of its own."""
    none = random_tokens(0, 0)
    return [forwarded("padded", [Group(none, (row,))], first) for first, row in enumerate(ROWS)]


def gradients(made: DecoderView, forwards: list, kind: str):
    """Loss and gradients, added up over forwards."""
    gradient = Gradient(made, Scored(), kind)
    params = made.model.trainable_parameters()
    return added_up(gradient(params, inputs, layout) for inputs, layout in forwards)


def outputs(made: DecoderView, forwards: list) -> np.ndarray:
    """What the head reads, (M, H), row by row."""
    found = []
    for inputs, layout in forwards:
        with made.active():
            hidden = hidden_states(made, inputs["tokens"], TrainingCache(layout))
        found.append(np.array(hidden.reshape(-1, hidden.shape[-1])[inputs["index"]]))
    return np.concatenate(found)


def tiny(folder, family: str, **overrides):
    model, _ = load(str(make_model(folder, family, **overrides)), dtype="float32")
    return model


def with_adapters(model):
    """Adds adapters whose B is not zero, where half of all gradients would be zero too."""
    apply_adapter(model, AdapterConfig(rank=4), seed=1)
    arrays = tree_flatten(model.trainable_parameters())
    keys = mx.random.split(mx.random.key(5), len(arrays))
    filled = [(n, 0.1 * mx.random.normal(a.shape, key=k)) for (n, a), k in zip(arrays, keys, strict=True)]
    model.load_weights(filled, strict=False)
    return model


@pytest.fixture(scope="module", params=TRAINED)
def trained(request, tmp_path_factory):
    """A view of a tiny model with adapters, in training mode, and its rows' gradients alone."""
    made = view(tiny(tmp_path_factory.mktemp("model"), request.param))
    with_adapters(made.model).train()
    return made, gradients(made, alone(), "whole")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_gives_the_outputs_of_rows_alone(trained, layout):
    made, _ = trained
    expected = outputs(made, alone())
    worst = np.abs(outputs(made, [forwarded(layout, GROUPS)]) - expected).max()
    assert worst < CLOSE * np.abs(expected).max()


@pytest.mark.parametrize("kind", ["whole", "checkpoint"])
@pytest.mark.parametrize("layout", ["packed", "prefix_shared"])
def test_every_layout_gives_the_gradients_of_rows_alone(trained, layout, kind):
    made, expected = trained
    assert difference(expected, gradients(made, [forwarded(layout, GROUPS)], kind)) < CLOSE


@pytest.mark.parametrize("multiple", [4, 16])
@pytest.mark.parametrize("layout", ["packed", "prefix_shared"])
def test_lengths_rounded_up_as_on_a_gpu_change_nothing(trained, layout, multiple, monkeypatch):
    for module in ("attention", "cache"):
        monkeypatch.setattr(f"mlxft.layouts.{module}.shape_multiple", lambda: multiple)
    made, expected = trained
    rounded = [forwarded(layout, GROUPS, multiple=multiple)]
    assert difference(expected, gradients(made, rounded, "whole")) < CLOSE


@pytest.mark.parametrize("family", ["gemma4_text", "qwen3_5", "qwen3_next", "lfm2"])
def test_every_weight_gets_its_gradient_in_a_shared_forward(family, tmp_path):
    """Also per-layer embeddings, convolutions, decays, routers and experts, which have no adapters."""
    made = view(tiny(tmp_path, family))
    apply_adapter(made.model, AdapterConfig(kind="full"))
    expected = gradients(made, alone(), "whole")
    for kind in ("whole", "checkpoint"):
        assert difference(expected, gradients(made, [forwarded("prefix_shared", GROUPS)], kind)) < CLOSE


@pytest.mark.parametrize("family", FAMILIES | MORE_FAMILIES)
def test_every_family_can_be_trained_in_every_layout(family, tmp_path):
    made = view(tiny(tmp_path, family))
    assert made.layouts == set(LAYOUTS) and made.refused == {}
    windows = [8, None] * (made.num_layers // 2) if family in WINDOWED else [None] * made.num_layers
    assert made.windows() == windows


def test_the_families_that_only_run_padded_are_those_with_a_reason():
    assert PADDED_FAMILIES.keys() == PADDED_ONLY.keys()


@pytest.mark.parametrize("family", PADDED_ONLY)
def test_families_that_cannot_follow_layouts_train_padded_and_whole(family, tmp_path):
    made = view(with_adapters(tiny(tmp_path, family)))
    expected = gradients(made, alone(), "whole")
    assert difference(expected, gradients(made, [forwarded("padded", GROUPS)], "whole")) < CLOSE
    assert made.layouts == {"padded"}
    refused = f"'{family}' cannot be trained so: {PADDED_ONLY[family]}. Use trainer.layout=padded"
    for refuse in (
        lambda: made.require("packed"),
        lambda: outputs(made, [forwarded("packed", GROUPS)]),
    ):
        with pytest.raises(InputError, match=refused):
            refuse()
    for refuse in (
        lambda: made.require("padded", "checkpoint"),
        lambda: gradients(made, alone(), "checkpoint"),
    ):
        with pytest.raises(InputError, match=f"'{family}' run only as a whole. Use trainer.gradient=whole"):
            refuse()


@pytest.mark.parametrize("family", UNTRAINABLE)
def test_families_without_gradients_are_refused_by_name(family):
    model = type("Model", (nn.Module,), {"__module__": f"mlx_lm.models.{family}", "model_type": family})()
    with pytest.raises(InputError, match=f"'{family}' cannot be trained: mlx-lm's code for them"):
        view(model)
