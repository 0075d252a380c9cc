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

    def window(self, batches: Sequence[Sequence[Row]], step: int) -> Optional[WindowGradient]:
        """Returns the gradients of the window, or None when asked to stop before its end."""
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
            mx.eval(total, norm)
        loss, metrics, gradients = total
        return WindowGradient(
            loss=loss.item(),
            grad_norm=norm.item(),
            gradients=gradients,
            tokens=int(counts["tokens"]),
            positions=positions,
            metrics={name: value.item() for name, value in metrics.items()},
        )

    def apply(self, window: WindowGradient, learning_rate: float) -> None:
        """Clips the window's gradients and updates the model with them."""
        model = self.gradient.view.model
        self.optimizer.learning_rate = learning_rate
        if self._update is None:
            self._update = self._make_update()
        model.update(self._update(model.trainable_parameters(), window.gradients, mx.array(window.grad_norm)))
        updated = (model.trainable_parameters(), self.optimizer.state)
        if self.gradient.observe:
            self.gradient.observe("optimiser", updated)
        mx.eval(updated)

    def _make_update(self) -> Callable:
        """Returns update(params, gradients, norm) -> params; made late, after a resume."""

        def update(params, gradients, norm):
            return self.optimizer.apply_gradients(clip(gradients, norm, self.clip_norm), params)

        if not self.gradient.compiled:
            return update
        state = [self.optimizer.state]
        return mx.compile(update, inputs=state, outputs=state)

    @property
    def _norm(self) -> Callable:
        return _compiled_norm if self.gradient.compiled else global_norm


# Thousands of small kernels for hundreds of adapter arrays become a few.
_compiled_norm = mx.compile(global_norm)
