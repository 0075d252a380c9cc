"""Probes: a few layers of the model's shape, with random weights and a small vocabulary, trained for real.

What a layer adds to the peak, and what is alive beside it, is the difference between such models, measured
at two lengths; the head is measured by itself.
"""

import gc
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from typing import Any, Optional

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten, tree_map

from mlxft.backend import backend
from mlxft.config.schema import Config
from mlxft.data.example import Example
from mlxft.layouts.arrange import Arranger
from mlxft.layouts.cache import TrainingCache
from mlxft.layouts.pieces import padded
from mlxft.losses import Head
from mlxft.models.decoder import DecoderView
from mlxft.models.new_rows import NewRows
from mlxft.models.new_tokens import new_tokens_of
from mlxft.planning.shape import ModelShape
from mlxft.segmented.build import build
from mlxft.segmented.gradients import head_loss
from mlxft.segmented.plan import GradientPlan
from mlxft.segmented.programs import Half, SegmentRunner
from mlxft.training import optimizer
from mlxft.training.objectives import HeadPlan, Sft
from mlxft.training.objectives.common import target_logps
from mlxft.training.step import Stepper

# Steps that took less are taken again: a CPU is done with small arrays before MLX has begun the next, and
# as many as in larger steps are alive at once only now and then. The largest peak is theirs.
_QUICK_S, _QUICK_REPEATS = 0.05, 3

_TYPES = {4: mx.float32, 2: mx.bfloat16}


@dataclass(frozen=True)
class Cost:
    """What a step took beyond what was there: bytes at its peak, seconds."""

    num_bytes: float
    seconds: float


@contextmanager
def only_new_garbage() -> Iterator[None]:
    """Within the block what was made before it is no garbage: to look through all of it takes longer than a
    small probe does, and there is a collection before each."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


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
        self.vocabulary, self.width = shape.vocabulary, shape.width
        self._filled: set[int] = set()
        self.choose([])

    def choose(self, indices: Sequence[int]) -> None:
        """Makes the model one of these layers, in their order."""
        for index in sorted(set(indices) - self._filled):
            _fill(self._layers[index])
        self._filled |= set(indices)
        self.view.decoder.layers = [self._layers[index] for index in sorted(indices)]
        self.view._windows = [self._windows[index] for index in sorted(indices)]

    def cut(self, vocabulary: int, width: int = 0) -> None:
        """Gives everything outside of the layers random arrays, the vocabulary cut to that many tokens.

        width: that of the hidden states that the head reads; 0: as it is.
        """
        inside = {id(module) for layer in self._layers for module in layer.modules()}
        outside = [module for module in self.view.model.modules() if id(module) not in inside]
        width = width or self.width
        sizes = {self.vocabulary: vocabulary, self.width: width}
        for module in outside:
            if isinstance(module, NewRows):  # the last of the cut vocabulary, as its table's end goes
                sizes[module.table_size] = vocabulary - (self.vocabulary - module.table_size)
                module.first = vocabulary - module.new_rows.shape[0]
        for module in outside:
            _fill_own(module, sizes)
        self.vocabulary, self.width = vocabulary, width

    def freeze_all_but_head(self) -> None:
        """Makes the head train alone, if it does: gradients of other tables are as long as the vocabulary."""
        of_head = {id(module) for module in self.view.head_module.modules()}
        for module in self.view.model.modules():
            if id(module) not in of_head:
                module.freeze(recurse=False)

    def unlike_any_axis(self, size: int) -> int:
        """Returns the size, or the next that no axis of an array has: a vocabulary is told by its size.

        Nor does one have what is left of it without new tokens.
        """
        axes = {axis for _, array in tree_flatten(self.view.model.parameters()) for axis in array.shape}
        more = len(new_tokens_of(self.view.model))
        return next(each for each in count(size) if not axes & set(range(each - more, each + 1)))

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
        costs: list[Cost] = []
        while len(costs) < repeat or (costs[-1].seconds < _QUICK_S and len(costs) < _QUICK_REPEATS):
            before = _begin()
            began = time.perf_counter()
            sums = stepper.sums([batch], 0)
            sums.read()
            costs.append(Cost(mx.get_peak_memory() - before, time.perf_counter() - began))
        before = _begin()
        stepper.apply(sums, 0.0)
        update = mx.get_peak_memory() - before
        most = max(cost.num_bytes for cost in costs[repeat - 1 :])
        return Cost(most, min(cost.seconds for cost in costs)), update

    def head(self, tokens: int, chunk: Optional[int]) -> Cost:
        """Returns the cost of the loss of so many tokens and its gradients, in one graph.

        chunk: tokens whose logits exist at once, None for all.
        """
        plan = _head_plan(chunk)
        inputs = {"index": mx.arange(tokens), "targets": mx.zeros((tokens,), mx.int32)}
        inputs["weights"] = mx.full((tokens,), 1 / tokens)
        hidden = mx.zeros((1, tokens, self.width), _TYPES[self.shape.item_bytes])
        trained = tree_map(lambda array: array, self.view.head_module.trainable_parameters())

        def loss(trained: Any, hidden: mx.array) -> mx.array:
            head = Head(self.view.head, trained, differentiated=True)
            if self.config.trainer.objective == "sft":
                return head_loss(Sft(plan), head, hidden, inputs)[0]
            return (target_logps(plan, head, hidden, inputs) * inputs["weights"]).sum()

        mx.eval(inputs, hidden)
        before, began = _begin(), time.perf_counter()
        mx.eval(mx.value_and_grad(loss, argnums=(0, 1) if trained else 1)(trained, hidden))
        seconds = time.perf_counter() - began
        self.view.head_module.update(trained)
        return Cost(mx.get_peak_memory() - before, seconds)

    def with_halves(self) -> bool:
        """Returns whether any of the chosen layers is an attention and an MLP, that can be walked apart."""
        return any(map(self.view.has_halves, range(self.view.num_layers)))

    def half(self, half: str, rows: int, length: int) -> float:
        """Returns the bytes of one half's backward by itself, of the chosen layer where that takes most."""
        runner = SegmentRunner(compiled=backend() != "cpu")
        cache = TrainingCache(padded(length), repeatable=self.config.trainer.deterministic)
        key = mx.random.key(0) if self.config.adapter.dropout else None
        entering = mx.ones((rows, length, self.shape.width), _TYPES[self.shape.item_bytes])
        mx.eval(entering)
        most, names = 0, [str(index) for index in range(self.view.num_layers)]
        for index in filter(self.view.has_halves, range(self.view.num_layers)):
            segment, before = Half(self.view, index, half, names), _begin()
            with self.view.active():
                mx.eval(runner.backward(segment, (entering,), (entering,), cache, key))
            most = max(most, mx.get_peak_memory() - before)
        return most

    def segmented_head(self, tokens: int, chunk: Optional[int]) -> Cost:
        """Returns the cost of the same where the backward is segmented: a model without layers."""
        self.choose([])
        objective = Sft(_head_plan(chunk), Arranger("padded", 1))
        peaks: dict[str, int] = {}  # by phase: a head that is the embedding is at work in others too

        def observe(phase: str, _: Any) -> None:
            peaks[phase] = mx.get_peak_memory()

        gradient = build(self.view, objective, GradientPlan("segmented"), observe=observe)
        batch = _rows(1, tokens, self.vocabulary, all_trained=True)
        prepared = objective.prepare(batch, objective.counts(batch))
        mx.eval(prepared.inputs)
        before, began = _begin(), time.perf_counter()
        mx.eval(gradient(self.view.model.trainable_parameters(), prepared.inputs, prepared.layout))
        return Cost(peaks["head"] - before, time.perf_counter() - began)


def _head_plan(chunk: Optional[int]) -> HeadPlan:
    return HeadPlan("full") if chunk is None else HeadPlan("chunked", chunk)


def _begin() -> int:
    """Starts to measure; returns the bytes that are in use."""
    gc.collect()  # or what an earlier probe left is freed meanwhile, and missing in the peak
    mx.synchronize()
    mx.reset_peak_memory()
    return mx.get_active_memory()


def _rows(rows: int, length: int, vocabulary: int, all_trained: bool = False) -> list[Example]:
    """Returns rows that forward `length` tokens each, of which one is trained on, or all."""
    random = np.random.default_rng(0)
    mask = np.full(length + 1, all_trained)
    mask[-1] = True
    return [
        Example(random.integers(0, vocabulary, length + 1).astype(np.int32), mask, "probe")
        for _ in range(rows)
    ]


def _fill(layer: nn.Module) -> None:
    for _, module in layer.named_modules():
        _fill_own(module)


def _fill_own(module: nn.Module, sizes: Optional[Mapping[int, int]] = None) -> None:
    """Gives a module's own parameters random values, axes of certain sizes cut to others."""
    for name, value in module.items():
        if isinstance(value, mx.array) and not name.startswith("_"):
            shape = [(sizes or {}).get(axis, axis) for axis in value.shape]
            if mx.issubdtype(value.dtype, mx.floating):
                # Around 1 for norms: what is next to nothing would agree with what leaves it out.
                values = 0.02 * mx.random.normal(shape, key=mx.random.key(0)) + (value.ndim == 1)
                module[name] = values.astype(value.dtype)
            else:
                module[name] = mx.random.randint(0, 2**31 - 1, shape, key=mx.random.key(0)).astype(
                    value.dtype
                )
            mx.eval(module[name])
