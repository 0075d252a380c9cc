"""A step as a GPU takes it, compiled and given ahead, is the step that waits for its gradients."""

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
from mlxft.training.step import Stepper
from tests.tiny_models import VOCAB_SIZE, model_config, random_model

SLACK = 1 if mx.default_device().type == mx.DeviceType.cpu else 10


def stepper(compiled: bool, name: str = "adamw") -> Stepper:
    made = view(random_model(model_config("qwen3")))
    apply_adapter(made.model, AdapterConfig(rank=2))
    objective = Sft(HeadPlan("full", 1024), Arranger("padded"))
    gradient = Gradient(made, objective, "whole", compiled=compiled)
    made_optimizer = optimizer.build(OptimizerConfig(name=name, lr=0.01))
    made_optimizer.init(made.model.trainable_parameters())
    return Stepper(objective, gradient, made_optimizer, clip_norm=0.1, seed=0, has_dropout=False)


def batches(step: int) -> list[list[Example]]:
    """Returns two micro-batches of a row each."""
    random = np.random.default_rng(step)
    rows = [random.integers(0, VOCAB_SIZE, 9).astype(np.int32) for _ in range(2)]
    return [[Example(row, np.ones(9, bool), "")] for row in rows]


def arrays(taken: Stepper) -> dict[str, np.ndarray]:
    weights = dict(tree_flatten(taken.gradient.view.model.trainable_parameters()))
    return {name: np.array(array) for name, array in (weights | taken.update.state()).items()}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_step_given_ahead_is_the_step_that_waits(name):
    waits, ahead = stepper(compiled=False, name=name), stepper(compiled=True, name=name)
    for step in range(3):
        one, other = waits.take(batches(step), step, 0.01), ahead.take(batches(step), step, 0.01)
        assert other.loss == pytest.approx(one.loss, rel=1e-6 * SLACK)
        assert other.grad_norm == pytest.approx(one.grad_norm, rel=1e-5 * SLACK)
    assert arrays(ahead).keys() == arrays(waits).keys()
    for key, array in arrays(waits).items():
        assert np.abs(arrays(ahead)[key] - array).max() <= 1e-4 * SLACK * max(np.abs(array).max(), 1e-6), key


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
