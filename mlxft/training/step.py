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
        """True if the window can be trained on."""
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
        sums = self.sums(batches, step)
        if sums is None:
            return None
        if self._is_overlapped:
            # A GPU is given the update while it is at the gradients: it does not wait for them to be read.
            mx.async_eval(self._updated(sums, learning_rate))
            return sums.read()
        window = sums.read()
        if window.is_finite:
            self.apply(sums, learning_rate)
        return window

    def window(self, batches: Sequence[Sequence[Row]], step: int) -> Optional[WindowGradient]:
        """Returns the gradients of the window, or None when asked to stop before its end."""
        sums = self.sums(batches, step)
        return None if sums is None else sums.read()

    def apply(self, sums: "WindowSums", learning_rate: float) -> None:
        """Clips the window's gradients and updates the model with them."""
        updated = self._updated(sums, learning_rate)
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

    def sums(self, batches: Sequence[Sequence[Row]], step: int) -> Optional["WindowSums"]:
        """Returns the window's sums, given to the device; None when asked to stop before its end."""
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
        return WindowSums(*total, gathered, norm, int(counts["tokens"]), positions)

    def _updated(self, sums: "WindowSums", learning_rate: float) -> Any:
        """Puts onto the model what the gradients make of it; returns all that is new, not computed yet."""
        model, update = self.gradient.view.model, self.update
        model.update(
            update(model.trainable_parameters(), sums.gathered, sums.loss, sums.norm, learning_rate)
        )
        return model.trainable_parameters(), update.held()


@dataclass
class WindowSums:
    """A window's sums, perhaps not computed yet. gathered: the gradients as the update takes them."""

    loss: mx.array
    metrics: dict[str, mx.array]
    gradients: Any
    gathered: Any
    norm: mx.array
    tokens: int
    positions: int

    def read(self) -> WindowGradient:
        """Waits for the sums and returns them as numbers."""
        return WindowGradient(
            loss=self.loss.item(),
            grad_norm=self.norm.item(),
            gradients=self.gradients,
            tokens=self.tokens,
            positions=self.positions,
            metrics={name: value.item() for name, value in self.metrics.items()},
        )
