"""One optimiser step: a window's counts, its gradients added up, clipped, applied or skipped."""

import math
from dataclasses import dataclass, field
from typing import Any, Callable, Optional, Sequence

import mlx.core as mx
import mlx.optimizers as optimizers
from mlx.utils import tree_map

from mlxft.segmented.gradients import Gradient
from mlxft.training.objectives.common import Objective, Row
from mlxft.training.optimizer import clip, global_norm
from mlxft.training.windows import dropout_key_data


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

    should_stop: asked between micro-batches; a window that is left this way has changed nothing and is
    run again from its start.
    """

    objective: Objective
    gradient: Gradient
    optimizer: optimizers.Optimizer
    clip_norm: float
    seed: int
    has_dropout: bool
    should_stop: Callable[[], bool] = lambda: False
    _update: Optional[Callable] = None

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
        norm = mx.array(window.grad_norm)
        updated = self._updated(window.gradients, mx.array(window.loss), norm, learning_rate)
        if self.gradient.observe:
            self.gradient.observe("optimiser", updated)
        mx.eval(updated)

    @property
    def _is_overlapped(self) -> bool:
        return self.gradient.compiled and self.gradient.observe is None

    def _take_overlapped(self, batches, step: int, learning_rate: float) -> Optional[WindowGradient]:
        """A GPU is given the update while it is at the gradients: it does not wait for them to be read."""
        sums = self._summed(batches, step)
        if sums is None:
            return None
        mx.async_eval(self._updated(sums.gradients, sums.loss, sums.norm, learning_rate))
        return sums.read()

    def _summed(self, batches: Sequence[Sequence[Row]], step: int) -> Optional["_Sums"]:
        params = self.gradient.view.model.trainable_parameters()
        batches, counts = self.objective.begin(batches, self.gradient.view)
        total, positions = None, 0
        for micro, batch in enumerate(batches):
            if self.should_stop():
                return None
            prepared = self.objective.prepare(batch, counts)
            positions += prepared.num_positions
            inputs = prepared.inputs
            if self.has_dropout:
                inputs["dropout_key"] = mx.array(dropout_key_data(self.seed, step, micro))
            part = self.gradient(params, inputs, prepared.layout)
            total = part if total is None else tree_map(mx.add, total, part)
            norm = self._norm(total[2])
            # All in one evaluation: separately, the forward would be held or run twice.
            submit = mx.async_eval if self._is_overlapped and micro == len(batches) - 1 else mx.eval
            submit(total, norm)
        return _Sums(*total, norm, int(counts["tokens"]), positions)

    def _updated(self, gradients: Any, loss: mx.array, norm: mx.array, learning_rate: float) -> Any:
        """Puts onto the model what the gradients make of it, and returns all that is new."""
        model = self.gradient.view.model
        self.optimizer.learning_rate = learning_rate
        if self._update is None:
            self._update = self._make_update()
        model.update(self._update(model.trainable_parameters(), gradients, loss, norm))
        return model.trainable_parameters(), self.optimizer.state

    def _make_update(self) -> Callable:
        """Returns update(params, gradients, loss, norm) -> params; made late, after a resume."""

        def update(params, gradients, loss, norm):
            return self.optimizer.apply_gradients(clip(gradients, norm, self.clip_norm), params)

        def guarded(params, gradients, loss, norm):
            """Leaves everything as it is where the gradients are of no use."""
            before = tree_map(lambda array: array, self.optimizer.state)
            finite = mx.isfinite(loss) & mx.isfinite(norm)
            after = update(params, gradients, loss, norm)
            _keep_unless(finite, self.optimizer.state, before)
            return tree_map(lambda new, old: mx.where(finite, new, old), after, params)

        if not self.gradient.compiled:
            return update
        state = [self.optimizer.state]
        return mx.compile(guarded, inputs=state, outputs=state)

    @property
    def _norm(self) -> Callable:
        return _compiled_norm if self.gradient.compiled else global_norm


@dataclass
class _Sums:
    """A window's sums, perhaps not computed yet."""

    loss: mx.array
    metrics: dict[str, mx.array]
    gradients: Any
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


def _keep_unless(useful: mx.array, state: Any, before: Any) -> None:
    """Puts the arrays of `before` back into an optimiser's state where `useful` is false, in place."""
    for place, old in before.items() if isinstance(before, dict) else enumerate(before):
        if isinstance(old, mx.array):
            state[place] = mx.where(useful, state[place], old)
        else:
            _keep_unless(useful, state[place], old)


# Thousands of small kernels for hundreds of adapter arrays become a few.
_compiled_norm = mx.compile(global_norm)
