"""Every objective, layout, gradient and family together: the numbers are those of the plain way.

Plain: a window's rows padded in one forward, the backward as a whole, all logits at once. By default the
cases are a pairwise cover of all that can be chosen; `pytest -m slow` takes the whole product.
"""

from dataclasses import replace
from functools import lru_cache
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optimizers
import numpy as np
import pytest
from mlx.utils import tree_flatten, tree_map

from mlxft.config import Config, from_dict
from mlxft.config.choices import PAIR_OBJECTIVES
from mlxft.data.batches import BatchOrder
from mlxft.data.example import Example, Pair, Unpaired
from mlxft.errors import InputError
from mlxft.layouts.arrange import Arranger
from mlxft.models.decoder import DecoderView, view
from mlxft.models.lora import apply_adapter
from mlxft.models.new_tokens import NewToken, add_new_tokens
from mlxft.segmented.build import build
from mlxft.segmented.plan import GradientPlan
from mlxft.training import objectives
from mlxft.training.objectives.common import Reference
from mlxft.training.objectives.unpaired import mismatch
from mlxft.training.optimizer import global_norm
from mlxft.training.reference import make as make_reference
from mlxft.training.step import Stepper, WindowGradient
from mlxft.training.windows import Windows
from tests.devices import ON_CPU
from tests.invariance.cases import (
    AXES,
    NEW_TOKENS,
    NO_WINDOW,
    cover,
    name,
    refused,
    settings,
    whole_product,
    window_size,
)
from tests.invariance.pairwise import Case, pairs_among, pairs_of
from tests.tiny_models import VOCAB_SIZE, model_config, random_model

# float32, sums in another order: relative to the loss, to the metrics, to the size of the gradient. A single
# array's, of which a model has hundreds, may be twice as far off (measured: 1.1e-5 at the most).
CLOSE = 1e-5 if ON_CPU else 1e-4
EXACT = 0.0 if ON_CPU else CLOSE

WHOLE = {"gradient": "whole", "segments": AXES["segments"][0], "in flight": AXES["in flight"][0]}
PLAIN = WHOLE | {"layout": "padded", "head": "full", "dropout": "no dropout", "multiple": 1}

NEW = range(100, 160)  # new tokens, in rows that the vocabulary has

# Tokens of prompt, chosen and rejected. The first prompt is longer than the short window; the second pair
# has a branch of one token, the third two that are the same.
SIZES = ((13, 4, 9), (6, 1, 5), (5, 6, 6), (1, 3, 1))


@pytest.mark.parametrize("case", cover(), ids=name)
def test_any_two_choices_together_give_the_numbers_of_the_plain_way(case):
    check(case)


@pytest.mark.slow
@pytest.mark.parametrize("case", whole_product(), ids=name)
def test_all_choices_together_give_the_numbers_of_the_plain_way(case):
    check(case)


@pytest.mark.parametrize("family", AXES["family"])
def test_the_plain_way_gives_the_numbers_of_the_models_own_code(family):
    """The padded rows in mlx-lm's own forward, differentiated by MLX: loss and every weight's gradient."""
    case = {axis: values[0] for axis, values in AXES.items()} | {"batch": "rows", "accumulate": "accumulated"}
    case |= PLAIN | {"family": family, "objective": "sft", "adapter": "full"}
    rows = [row for batch in window(case) for row in batch]
    made, _ = trained(family, "full")
    tokens = np.zeros((len(rows), max(row.num_tokens for row in rows)), np.int32)
    mask = np.zeros(tokens.shape, np.float32)
    for number, row in enumerate(rows):
        tokens[number, : row.num_tokens], mask[number, : row.num_tokens] = row.tokens, row.mask
    given, targets, weights = (mx.array(x) for x in (tokens[:, :-1], tokens[:, 1:], mask[:, 1:]))

    def loss(params):
        made.model.update(params)
        sums = nn.losses.cross_entropy(made.model(given), targets, weights, reduction="sum")
        return sums / weights.sum()

    params = made.model.trainable_parameters()
    value, gradients = mx.value_and_grad(loss)(params)
    made.model.update(params)
    norm = global_norm(gradients)
    expected = WindowGradient(value.item(), norm.item(), gradients, int(mask.sum()), positions=0)
    assert_equal(run(case, [rows]), expected, CLOSE, family)


def test_what_the_cover_leaves_out_is_what_the_code_refuses():
    covered = {pair for case in cover() for pair in pairs_of(case)}
    left_out = [dict(pair) for pair in pairs_among(AXES) if pair not in covered]
    for part in sorted(left_out, key=lambda part: str(part.get("family"))):
        if "window" in part:  # has the family any?
            sizes = trained(part["family"], "lora")[0].windows()
            assert any(sizes) == (part["window"] == NO_WINDOW), part
        elif "family" in part:
            made, _ = trained(part["family"], "lora")
            gradient = part.get("gradient", "segmented" if part.keys() & WHOLE.keys() else "whole")
            with pytest.raises(InputError, match=f"'{part['family']}'"):
                made.require(part.get("layout", "padded"), gradient)
                if part.get("noise") == "noise":
                    made.require_noise()
                if part.get("adapter") == NEW_TOKENS:
                    made.require_new_tokens()
        else:
            with pytest.raises(InputError):
                configured(part)


def check(case: Case) -> None:
    """Compares a case with the plain way, then its backward with the whole one of the same forwards.

    The second has to be exact, dropout's masks included: the arithmetic is the same.
    """
    batches = window(case)
    expected = run(case | PLAIN, [[row for batch in batches for row in batch]])
    found = run(case | {"dropout": "no dropout"}, batches)
    limit = EXACT if forwards_plainly(case) else CLOSE
    assert_equal(found, expected, limit, case["family"])
    if case["dropout"] == "dropout":
        undropped, found = found, run(case, batches)
        apart = global_norm(tree_map(mx.subtract, found.gradients, undropped.gradients)).item()
        assert apart > 0.01 * undropped.grad_norm
    if case | WHOLE != case:
        assert_equal(found, run(case | WHOLE, batches), EXACT, case["family"])


def forwards_plainly(case: Case) -> bool:
    """Tells whether the forward is the plain one to the last operation; a packed row alone is one too."""
    layout = case["layout"]
    if case["batch"] == "one row" and configured(case).trainer.objective not in PAIR_OBJECTIVES:
        layout = layout.replace("packed", "padded")
    others = case["head"], case["multiple"], case["accumulate"]
    return (layout, *others) == ("padded", "full", 1, "at once")


def assert_equal(found: WindowGradient, expected: WindowGradient, limit: float, family: str) -> None:
    """Compares loss, metrics and every gradient; a limit of 0 allows no difference at all."""
    assert found.tokens == expected.tokens
    assert abs(found.loss - expected.loss) <= limit * abs(expected.loss)
    assert found.metrics.keys() == expected.metrics.keys()
    largest = max((abs(value) for value in expected.metrics.values()), default=0.0)
    for metric, value in expected.metrics.items():
        # A reward is a difference of log-probabilities, and as exact as they are.
        near = limit * max(abs(value), largest / 10)
        assert abs(found.metrics[metric] - value) <= near, metric
    gradients, others = (dict(tree_flatten(each.gradients)) for each in (expected, found))
    assert gradients.keys() == others.keys() and expected.grad_norm > 0
    total = global_norm({array: others[array] - gradients[array] for array in gradients}).item()
    assert (
        total
        <= (CLOSE if any(is_added_up(array, family) for array in gradients) else limit) * found.grad_norm
    )
    apart = {array: difference(others[array], gradients[array], expected.grad_norm) for array in gradients}
    limits = {array: 2 * (CLOSE if is_added_up(array, family) else limit) for array in gradients}
    assert not {array: by for array, by in apart.items() if not by <= limits[array]}


def difference(found: mx.array, expected: mx.array, whole: float) -> float:
    """Returns the norm of the difference of two gradients over that of the gradient.

    whole: the norm of all gradients together. One below a hundredth of it is what larger terms leave and
    has their rounding; so has that of a single number, which all terms of a layer add up to.
    """
    size = whole if expected.size == 1 else max(mx.linalg.norm(expected).item(), whole / 100)
    return mx.linalg.norm(found - expected).item() / size


def is_added_up(array: str, family: str) -> bool:
    """Tells whether a gradient is one of more than two terms, which another backward adds in another order.

    Gemma 4 reads its embedding as the head, before layer 0 and for every layer's own inputs.
    """
    return family.startswith("gemma4") and ".embed_tokens." in array


def run(case: Case, batches: list[list[Any]]) -> WindowGradient:
    """Returns what an optimiser's step is taken with. Raises: InputError for what is refused."""
    config = configured(case)
    made, reference = trained(case["family"], case["adapter"])
    made.require(config.trainer.layout, config.trainer.gradient)
    objective = objectives.build(config, Arranger(config.trainer.layout, case["multiple"]), reference)
    gradient = build(made, objective, plan(config))
    dropout = config.adapter.dropout > 0
    noise = config.trainer.neftune_alpha
    stepper = Stepper(objective, gradient, optimizers.SGD(0.1), 0.0, 1, dropout, noise)
    with made.window_lowered(window_size(case)):
        return stepper.window(batches, step=0)


def plan(config: Config) -> GradientPlan:
    trainer = config.trainer
    layers = 1 if trainer.segment_layers in ("auto", "half") else trainer.segment_layers
    in_flight = 1 if trainer.in_flight == "auto" else trainer.in_flight
    return GradientPlan(trainer.gradient, layers, in_flight, trainer.segment_layers == "half")


def configured(part: Case) -> Config:
    """Returns the checked configuration. Raises: InputError."""
    return from_dict({"model.path": "owner/name", "data.train": __file__} | settings(part))


@lru_cache(maxsize=4)
def trained(family: str, adapter: str) -> tuple[DecoderView, Reference]:
    """Returns a tiny model that has moved from where it started, and the reference, which has not."""
    model = random_model(model_config(family))
    if adapter == NEW_TOKENS:
        add_new_tokens(model, [NewToken(number, "", False, (number % 7, 9)) for number in NEW])
    made = view(model)
    part = {"objective": "dpo sigmoid", "gradient": "whole", "adapter": adapter, "dropout": "dropout"}
    part["family"] = family
    if refused(part):
        part["dropout"] = "no dropout"
    config = configured(part)
    apply_adapter(model, config.adapter, seed=1)
    reference = make_reference(config, made)
    arrays = tree_flatten(model.trainable_parameters())
    keys = mx.random.split(mx.random.key(5), len(arrays))
    moved = [(n, a + 0.05 * mx.random.normal(a.shape, key=k)) for (n, a), k in zip(arrays, keys, strict=True)]
    model.load_weights(moved, strict=False)
    mx.eval(model.parameters())
    return made, reference


def window(case: Case) -> list[list[Any]]:
    """Returns the micro-batches of a run's first step."""
    config = configured(case)
    rows = rows_of(config.trainer.objective)
    order = BatchOrder([row.num_tokens for row in rows], config.data.batch_size, shuffle=False, seed=0)
    return Windows(rows, order, config.trainer.accumulate).at(0)


@lru_cache(maxsize=None)
def rows_of(objective: str) -> list[Any]:
    """Returns the pairs as rows of the objective: single answers are chosen and rejected ones by turns."""
    if objective in PAIR_OBJECTIVES:
        return pairs()
    answers = []
    for number, pair in enumerate(pairs()):
        answer = (pair.rejected, pair.rejected_mask) if number % 2 else (pair.chosen, pair.chosen_mask)
        answers.append((pair.prompt, *answer))
    if objective == "kto":
        return mismatch([Unpaired(*each, number % 2 == 0, "") for number, each in enumerate(answers)], 100)
    return [
        Example(np.concatenate([prompt, answer]), np.concatenate([np.zeros(len(prompt), bool), mask]), "")
        for prompt, answer, mask in answers
    ]


def pairs() -> list[Pair]:
    """Random tokens; the last one of a longer answer is the template's, not the answer's."""
    random = np.random.default_rng(7)
    made = []
    for sizes in SIZES:
        tokens = [random.integers(3, VOCAB_SIZE, size).astype(np.int32) for size in sizes]
        masks = [np.arange(size) < max(size - 1, 1) for size in sizes[1:]]
        made.append(Pair(*tokens, *masks, ""))
    made[2] = replace(made[2], rejected=made[2].chosen)
    return made
