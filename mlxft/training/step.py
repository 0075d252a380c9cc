"""One optimiser step: a window's counts, its gradients added up, clipped, applied or skipped."""

import math
from dataclasses import dataclass, field
from typing import Any, Callable, Optional, Sequence

import mlx.core as mx
import mlx.optimizers as optimizers
from mlx.utils import tree_map

from mlxft.layouts.noise import noise_inputs
from mlxft.segmented.build import AnyGradient
from mlxft.training.objectives.common import Objective, Row
from mlxft.training.optimizer import Grouping
from mlxft.training.update import Update, make_update
from mlxft.training.windows import dropout_key_data, noise_key_data


@dataclass
class WindowGradient:
    """The loss, metrics and gradients of a whole window, and what it cost."""

    loss: float
    grad_norm: float
    gradients: Any
    tokens: int
    positions: int
    metrics: dict[str, float] = field(default_factory=dict)

    @property
    def is_finite(self) -> bool:
        return math.isfinite(self.loss) and math.isfinite(self.grad_norm)


@dataclass
class Stepper:
    """Computes and applies optimiser steps.

    noise_alpha: of NEFTune, 0 for none. group_of: the groups of arrays, None for one. should_stop: asked
    between micro-batches; a window that is left this way has changed nothing and is run again from its start.
    """

    objective: Objective
    gradient: AnyGradient
    optimizer: optimizers.Optimizer
    clip_norm: float
    seed: int
    has_dropout: bool
    noise_alpha: float = 0.0
    group_of: Optional[Grouping] = None
    should_stop: Callable[[], bool] = lambda: False
    _update: Optional[Update] = field(default=None, init=False)

    def take(
        self, batches: Sequence[Sequence[Row]], step: int, learning_rate: float
    ) -> Optional[WindowGradient]:
        """Takes an optimiser step and returns its window, or None when asked to stop before its end.

        A window that is not finite changes nothing.
        """
        if self._is_overlapped:
            return self._take_overlapped(batches, step, learning_rate)
        window = self.window(batches, step)
        if window is not None and window.is_finite:
            self.apply(window, learning_rate)
        return window

    def window(self, batches: Sequence[Sequence[Row]], step: int) -> Optional[WindowGradient]:
        """Returns the gradients of the window, or None when asked to stop before its end."""
        sums = self._summed(batches, step)
        return None if sums is None else sums.read()

    def apply(self, window: WindowGradient, learning_rate: float) -> None:
        """Clips the window's gradients and updates the model with them."""
        gathered, _ = self.update.gathered(window.gradients)
        self._put(gathered, mx.array(window.loss), mx.array(window.grad_norm), learning_rate)
        updated = self.gradient.view.model.trainable_parameters(), self.update.state()
        if self.gradient.observe:
            self.gradient.observe("optimiser", updated)
        mx.eval(updated)

    @property
    def update(self) -> Update:
        """What applies gradients; made late, after a resume."""
        if self._update is None:
            params = self.gradient.view.model.trainable_parameters()
            compiled = self.gradient.compiled
            self._update = make_update(self.optimizer, self.clip_norm, params, compiled, self.group_of)
            self.optimizer = self._update.optimizer  # whose state it may have put into another form
        return self._update

    @property
    def _is_overlapped(self) -> bool:
        return self.gradient.compiled and self.gradient.observe is None

    def _take_overlapped(self, batches, step: int, learning_rate: float) -> Optional[WindowGradient]:
        """A GPU is given the update while it is at the gradients: it does not wait for them to be read."""
        sums = self._summed(batches, step)
        if sums is None:
            return None
        self._put(sums.gathered, sums.loss, sums.norm, learning_rate)
        mx.async_eval(self.gradient.view.model.trainable_parameters())
        return sums.read()

    def _summed(self, batches: Sequence[Sequence[Row]], step: int) -> Optional["_Sums"]:
        params = self.gradient.view.model.trainable_parameters()
        batches, counts = self.objective.begin(batches, self.gradient.view)
        total, positions, groups = None, 0, 0
        for micro, batch in enumerate(batches):
            if self.should_stop():
                return None
            prepared = self.objective.prepare(batch, counts)
            positions += prepared.num_positions
            inputs = prepared.inputs
            if self.has_dropout:
                inputs["dropout_key"] = mx.array(dropout_key_data(self.seed, step, micro))
            if self.noise_alpha:
                key = noise_key_data(self.seed, step)
                inputs |= noise_inputs(prepared.arranged, groups, self.noise_alpha, key)
                groups += len(prepared.arranged.groups)
            part = self.gradient(params, inputs, prepared.layout)
            total = part if total is None else tree_map(mx.add, total, part)
            if micro < len(batches) - 1:
                mx.eval(total)
        gathered, norm = self.update.gathered(total[2])
        # All in one evaluation: separately, the forward would be held or run twice.
        (mx.async_eval if self._is_overlapped else mx.eval)(total, gathered, norm)
        return _Sums(*total, gathered, norm, int(counts["tokens"]), positions)

    def _put(self, gathered: Any, loss: mx.array, norm: mx.array, learning_rate: float) -> None:
        model = self.gradient.view.model
        model.update(self.update(model.trainable_parameters(), gathered, loss, norm, learning_rate))


@dataclass
class _Sums:
    """A window's sums, perhaps not computed yet."""

    loss: mx.array
    metrics: dict[str, mx.array]
    gradients: Any
    gathered: Any  # the gradients as the update takes them
    norm: mx.array
    tokens: int
    positions: int

    def read(self) -> WindowGradient:
        return WindowGradient(
            loss=self.loss.item(),
            grad_norm=self.norm.item(),
            gradients=self.gradients,
            tokens=self.tokens,
            positions=self.positions,
            metrics={name: value.item() for name, value in self.metrics.items()},
        )
