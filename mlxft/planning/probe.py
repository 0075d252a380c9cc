"""Probes: a few layers of the model's shape, with random weights and a small vocabulary, trained for real.

What a layer adds to the peak, and what is alive beside it, is the difference between such models, measured
at two lengths; the head is measured by itself.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten, tree_map

from mlxft.backend import backend
from mlxft.config.schema import Config
from mlxft.data.example import Example
from mlxft.layouts.arrange import Arranger
from mlxft.losses import Head
from mlxft.models.decoder import DecoderView
from mlxft.planning.shape import ModelShape
from mlxft.segmented.build import GradientPlan, build
from mlxft.segmented.gradients import trained_head
from mlxft.training import optimizer
from mlxft.training.objectives import HeadPlan, Sft
from mlxft.training.step import Stepper

VOCABULARY = 64  # of the probes of layers: their head is not to count
HEAD_VOCABULARIES = (2048, 4096)
HEAD_TOKENS = (128, 256)


@dataclass(frozen=True)
class Cost:
    """What a step took beyond what was there: bytes at its peak, seconds."""

    num_bytes: float
    seconds: float


class ProbeModel:
    """The model of `shape`, made small: chosen layers, a cut vocabulary, random arrays.

    It takes over the shape's modules.
    """

    def __init__(self, shape: ModelShape, config: Config):
        self.config = config
        self.shape = shape
        self.view: DecoderView = shape.view
        self._layers = list(self.view.layers)
        self._windows = list(self.view.windows())
        self._filled: set[int] = set()
        self.choose([])

    def choose(self, indices: Sequence[int]) -> None:
        """Makes the model one of these layers, in their order."""
        for index in sorted(set(indices) - self._filled):
            _fill(self._layers[index])
        self._filled |= set(indices)
        self.view.decoder.layers = [self._layers[index] for index in sorted(indices)]
        self.view._windows = [self._windows[index] for index in sorted(indices)]

    def cut(self, vocabulary: int) -> None:
        """Gives everything outside of the layers random arrays, the vocabulary cut to that many tokens."""
        inside = {id(module) for layer in self._layers for module in layer.modules()}
        for _, module in self.view.model.named_modules():
            if id(module) not in inside:
                _fill_own(module, self.shape.vocabulary, vocabulary)
        self.vocabulary = vocabulary

    def step(self, plan: GradientPlan, rows: int, length: int, repeat: int = 1) -> tuple[Cost, float]:
        """Returns the cost of a step's gradient, and the bytes that the update takes beyond its gradients."""
        config = self.config
        objective = Sft(HeadPlan(), Arranger("padded", 1))
        gradient = build(self.view, objective, plan, config.trainer.deterministic)
        stepper = Stepper(
            objective,
            gradient,
            optimizer.build(config.optimizer),
            config.trainer.clip_norm,
            config.trainer.seed,
            config.adapter.dropout > 0,
        )
        stepper.optimizer.init(self.view.model.trainable_parameters())
        mx.eval(self.view.model.trainable_parameters(), stepper.optimizer.state)
        batch = _rows(rows, length, self.vocabulary)
        costs = []
        for _ in range(repeat):
            before = _begin()
            began = time.perf_counter()
            window = stepper.window([batch], 0)
            costs.append(Cost(mx.get_peak_memory() - before, time.perf_counter() - began))
        before = _begin()
        stepper.apply(window, 0.0)
        update = mx.get_peak_memory() - before
        return Cost(costs[-1].num_bytes, min(cost.seconds for cost in costs)), update

    def forward_seconds(self, rows: int, length: int) -> float:
        """Returns the seconds of a forward through the chosen layers."""
        from mlxft.layouts.cache import TrainingCache
        from mlxft.layouts.pieces import padded
        from mlxft.segmented.gradients import hidden_states

        tokens = mx.zeros((rows, length), mx.int32)
        with self.view.active():
            began = time.perf_counter()
            mx.eval(hidden_states(self.view, tokens, TrainingCache(padded(length))))
        return time.perf_counter() - began


def _begin() -> int:
    """Starts to measure; returns the bytes that are in use."""
    mx.synchronize()
    mx.reset_peak_memory()
    return mx.get_active_memory()


def _rows(rows: int, length: int, vocabulary: int) -> list[Example]:
    """Returns rows that forward `length` tokens each, of which one is trained on."""
    random = np.random.default_rng(0)
    mask = np.zeros(length + 1, bool)
    mask[-1] = True
    return [
        Example(random.integers(0, vocabulary, length + 1).astype(np.int32), mask, "probe")
        for _ in range(rows)
    ]


def _fill(layer: nn.Module) -> None:
    for _, module in layer.named_modules():
        _fill_own(module)


def _fill_own(module: nn.Module, size: int = 0, cut: int = 0) -> None:
    """Gives a module's own parameters random values, axes of `size` cut to `cut`."""
    for name, value in module.items():
        if isinstance(value, mx.array) and not name.startswith("_"):
            shape = [cut if size and axis == size else axis for axis in value.shape]
            if mx.issubdtype(value.dtype, mx.floating):
                module[name] = (0.02 * mx.random.normal(shape, key=mx.random.key(0))).astype(value.dtype)
            else:
                module[name] = mx.random.randint(0, 2**31 - 1, shape, key=mx.random.key(0)).astype(value.dtype)
            mx.eval(module[name])
