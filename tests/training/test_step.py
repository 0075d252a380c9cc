"""A step as a GPU takes it, compiled and given ahead, is the step that waits for its gradients."""

import io

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten

from mlxft.config.choices import OPTIMIZERS
from mlxft.config.schema import AdapterConfig, OptimizerConfig
from mlxft.data.example import Example
from mlxft.layouts.arrange import Arranger
from mlxft.models.decoder import view
from mlxft.models.lora import apply_adapter
from mlxft.segmented.gradients import Gradient
from mlxft.training import optimizer
from mlxft.training.objectives import HeadPlan, Sft
from mlxft.training.optimizer import Group
from mlxft.training.step import Stepper
from mlxft.training.update import make_update
from tests.devices import SLACK
from tests.tiny_models import VOCAB_SIZE, model_config, random_model

GROUPS = OptimizerConfig(lora_plus_ratio=4.0, decay_vectors=False)


def stepper(compiled: bool, name: str = "adamw", group_of=None) -> Stepper:
    made = view(random_model(model_config("qwen3")))
    adapter = AdapterConfig(rank=2) if group_of is None else AdapterConfig(rank=2, kind="dora")
    apply_adapter(made.model, adapter)
    objective = Sft(HeadPlan("full", 1024), Arranger("padded"))
    gradient = Gradient(made, objective, "whole", compiled=compiled)
    made_optimizer = optimizer.build(OptimizerConfig(name=name, lr=0.01))
    made_optimizer.init(made.model.trainable_parameters())
    given = {"clip_norm": 0.1, "seed": 0, "has_dropout": False, "group_of": group_of}
    return Stepper(objective, gradient, made_optimizer, **given)


def batches(step: int) -> list[list[Example]]:
    """Returns two micro-batches of a row each."""
    random = np.random.default_rng(step)
    rows = [random.integers(0, VOCAB_SIZE, 9).astype(np.int32) for _ in range(2)]
    return [[Example(row, np.ones(9, bool), "")] for row in rows]


def arrays(taken: Stepper) -> dict[str, np.ndarray]:
    weights = dict(tree_flatten(taken.gradient.view.model.trainable_parameters()))
    return {name: np.array(array) for name, array in (weights | taken.update.state()).items()}


@pytest.mark.parametrize("groups", [False, True])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_step_given_ahead_is_the_step_that_waits(name, groups):
    group_of = optimizer.grouping(GROUPS) if groups else None
    waits, ahead = (stepper(compiled, name, group_of) for compiled in (False, True))
    rate = 0.0025 if groups else 0.01  # a B's is four times that
    # Rounding of gradients near zero, of which DoRA has more, is what rmsprop makes large.
    limit = (1e-3 if groups else 1e-4) * SLACK
    for step in range(3):
        one, other = waits.take(batches(step), step, rate), ahead.take(batches(step), step, rate)
        assert other.loss == pytest.approx(one.loss, rel=1e-6 * SLACK)
        assert other.grad_norm == pytest.approx(one.grad_norm, rel=1e-5 * SLACK)
    assert arrays(ahead).keys() == arrays(waits).keys()
    for key, array in arrays(waits).items():
        assert np.abs(arrays(ahead)[key] - array).max() <= limit * max(np.abs(array).max(), 1e-6), key


@pytest.mark.parametrize("compiled", [False, True])
def test_a_window_that_is_not_finite_changes_nothing(compiled):
    taken = stepper(compiled)
    taken.take(batches(0), 0, 0.01)
    layer = taken.gradient.view.layers[0].self_attn.q_proj
    sound = layer.lora_a
    layer.lora_a = sound * float("nan")
    before = arrays(taken)
    assert not taken.take(batches(1), 1, 0.01).is_finite
    after = arrays(taken)
    changed = {key for key in before if not np.array_equal(before[key], after[key], equal_nan=True)}
    assert changed <= {"learning_rate"}
    layer.lora_a = sound
    assert taken.take(batches(1), 2, 0.01).is_finite
    moved = arrays(taken)
    assert all(not np.array_equal(before[key], moved[key]) for key in before if "lora_b" in key)


def test_a_stop_within_the_window_changes_nothing():
    taken = stepper(compiled=True)
    before, answers = arrays(taken), iter([False, True])
    taken.should_stop = lambda: next(answers)
    assert taken.take(batches(0), 0, 0.01) is None
    assert all(np.array_equal(array, arrays(taken)[key]) for key, array in before.items())


@pytest.mark.parametrize("compiled", [False, True])
def test_groups_that_do_not_differ_give_what_one_group_gives(compiled):
    one, groups = stepper(compiled, group_of=lambda *_: Group()), stepper(compiled, group_of=by_layer)
    for step in range(2):
        for taken in (one, groups):
            taken.take(batches(step), step, 0.01)
    assert arrays(one).keys() == arrays(groups).keys()
    for key, array in arrays(one).items():
        assert np.allclose(arrays(groups)[key], array, rtol=1e-5, atol=1e-7), key


def by_layer(name, array):
    """Two groups that are treated alike to the last digit that counts."""
    return Group() if ".layers.0." in name else Group(rate=1 + 1e-9)


def test_a_group_has_its_own_rate_and_decay():
    """AdamW's first step: w (1 - lr decay) - lr g / (|g| + eps), with each group's own lr and decay."""
    params = {"q": {"lora_a": mx.array([[1.0]]), "lora_b": mx.array([[1.0]]), "m": mx.array([1.0])}}
    gradients = {"q": {"lora_a": mx.array([[2.0]]), "lora_b": mx.array([[-3.0]]), "m": mx.array([4.0])}}
    made = optimizer.build(OptimizerConfig(weight_decay=0.5))
    made.init(params)
    for compiled in (False, True):
        update = make_update(made, 0.0, params, compiled, optimizer.grouping(GROUPS))
        gathered, norm = update.gathered(gradients)
        assert norm.item() == pytest.approx(29**0.5)
        after = update(params, gathered, mx.array(1.0), norm, 0.1)["q"]
        assert after["lora_a"].item() == pytest.approx(0.95 - 0.1, rel=1e-5)
        assert after["lora_b"].item() == pytest.approx(1 - 0.4 * 0.5 + 0.4, rel=1e-5)
        assert after["m"].item() == pytest.approx(1 - 0.1, rel=1e-5)
        state = update.state()
        assert state["learning_rate"].item() == pytest.approx(0.1) and state["step"].item() == 1
        assert {name for name in state if "." in name} == {
            f"q.{name}.{kind}" for name in ("lora_a", "lora_b", "m") for kind in ("m", "v")
        }


def test_all_are_clipped_by_one_norm():
    params = {"a.lora_a": mx.array([[0.0]]), "a.lora_b": mx.array([[0.0]])}
    made = optimizer.build(OptimizerConfig(name="sgd", weight_decay=0.0))
    made.init(params)
    for compiled in (False, True):
        update = make_update(made, 1.0, params, compiled, optimizer.grouping(GROUPS))
        gradients = {"a.lora_a": mx.array([[3.0]]), "a.lora_b": mx.array([[4.0]])}
        gathered, norm = update.gathered(gradients)
        after = dict(tree_flatten(update(params, gathered, mx.array(1.0), norm, 1.0)))
        assert after["a.lora_a"].item() == pytest.approx(-0.6, rel=1e-5)
        assert after["a.lora_b"].item() == pytest.approx(-0.8 * 4, rel=1e-5)


@pytest.mark.parametrize("name", ["sgd", "adamw", "adafactor"])
def test_no_step_given_ahead_leaves_work_for_the_next(name):
    """What a step doesn't evaluate, such as sgd's count of steps, would hold every step before it."""
    taken = stepper(compiled=True, name=name)
    taken.take(batches(0), 0, 0.01)
    mx.synchronize()
    left = io.StringIO()
    mx.export_to_dot(left, *[array for _, array in tree_flatten(taken.update.held())])
    assert "shape=rectangle" not in left.getvalue()
