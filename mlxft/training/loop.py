"""The one loop: windows in, optimiser steps out; validation, guards, checkpoints and stops between."""

import logging
import math
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Callable, Optional, Protocol, Sequence

import mlx.core as mx
from mlx.utils import tree_flatten

from mlxft.backend import backend
from mlxft.config.schema import Config
from mlxft.errors import GuardStop, Interrupted
from mlxft.training.best import BestAdapter
from mlxft.training.checkpoint import CheckpointStore
from mlxft.training.memory import StepMemory, memory_guard
from mlxft.training.non_finite import first_non_finite
from mlxft.training.objectives.common import Row
from mlxft.training.optimizer import learning_rate
from mlxft.training.signals import StopRequest
from mlxft.training.step import Stepper, WindowGradient
from mlxft.training.trackers import Tracked
from mlxft.training.windows import Windows

log = logging.getLogger("mlxft")

MAX_SKIPPED_IN_A_ROW = 3


@dataclass
class Progress:
    """What a checkpoint remembers beside arrays: plain numbers, the same after a resume."""

    step: int = 0
    tokens: int = 0
    positions: int = 0
    skipped: int = 0
    skipped_in_a_row: int = 0
    validated_step: int = -1
    best_loss: Optional[float] = None
    best_step: Optional[int] = None
    without_improvement: int = 0
    last_loss: Optional[float] = None
    seconds: float = 0.0


class Screen(Protocol):
    """Where a person follows the run (training/screen.py)."""

    def step(self, record: dict[str, Any]) -> None:
        """Shows an optimiser step."""

    def valid(self, record: dict[str, Any]) -> None:
        """Shows a validation."""


@dataclass
class Loop:
    """Everything a run needs; `run` takes it from `progress.step` to `total_steps`.

    write_adapter: writes the present adapter into a folder. validate: returns the validation record,
    None without validation data. identity: what else a checkpoint's state has to say. saved_step: the
    step of the newest checkpoint in the run's folder.
    """

    config: Config
    stepper: Stepper
    windows: Windows
    total_steps: int
    metrics: Tracked
    store: CheckpointStore
    screen: Screen
    stop: StopRequest
    write_adapter: Callable[[Path], None]
    best: BestAdapter
    memory: StepMemory
    validate: Optional[Callable[[], dict[str, Any]]]
    identity: dict[str, Any]
    progress: Progress
    saved_step: int

    def run(self) -> str:
        """Trains to the end and returns "completed" or "early_stopped".

        Raises: Interrupted after a signal; GuardStop after three non-finite steps in a row, without
        memory or disk left, or with weights that are not finite.
        """
        self._validate_if_due()
        while self.progress.step < self.total_steps and not self._should_stop_early():
            if not self._take_step():
                self._interrupted()
            self._validate_if_due()
            if self._is_due(self.config.trainer.save_every):
                self._save()
            if self.stop() and self.progress.step < self.total_steps:
                self._interrupted()
        self._save()
        if self._should_stop_early():
            times = self.progress.without_improvement
            log.info("stopped early: no improvement in %d validation%s", times, "s" * (times != 1))
            return "early_stopped"
        if self.progress.skipped == self.progress.step:
            raise GuardStop(
                f"stopped: none of the {self.progress.step} steps had finite gradients, so nothing was "
                f"trained. What may help: {self._remedy()}"
            )
        return "completed"

    def _remedy(self) -> str:
        """Returns what helps where gradients are never finite."""
        ways = ["a lower optimizer.lr or adapter.alpha"]
        if self.config.trainer.objective != "sft":
            ways.append("loss.beta nearer to its default")
        if backend() != "cpu" and self.config.model.dtype != "float32":
            ways.append("model.dtype=float32")
        return ", or ".join(ways)

    def _take_step(self) -> bool:
        """Takes one optimiser step; False if a stop was asked for within its window."""
        began = time.perf_counter()
        step = self.progress.step
        self.memory.begin(step + 1)
        rate = learning_rate(step, self.total_steps, self.config.optimizer.lr, self.config.schedule)
        batches = self.windows.at(step)
        with memory_guard(f"step {step + 1}", batches):
            window = self.stepper.take(batches, step, rate)
            if window is None:
                return False
        self._account(window, rate, time.perf_counter() - began)
        if not window.is_finite:
            self._guard(window, batches)
        return True

    def _account(self, window: WindowGradient, rate: float, seconds: float) -> None:
        progress = self.progress
        progress.step += 1
        progress.tokens += window.tokens
        progress.positions += window.positions
        progress.seconds += seconds
        record = {
            "kind": "train",
            "step": progress.step,
            "loss": window.loss,
            "grad_norm": window.grad_norm,
            "lr": rate,
            "tokens": window.tokens,
            "positions": window.positions,
            **window.metrics,
            "seconds": seconds,
            "tokens_per_s": window.tokens / seconds,
            "peak_bytes": self.memory.peak_bytes(),
        }
        if window.is_finite:
            progress.skipped_in_a_row = 0
            progress.last_loss = window.loss
        else:
            progress.skipped += 1
            progress.skipped_in_a_row += 1
            record["skipped"] = progress.skipped
        self.metrics.write(record)
        self.screen.step(record)

    def _guard(self, window: WindowGradient, batches: Sequence[Sequence[Row]]) -> None:
        step = self.progress.step
        gradient = self.stepper.gradient
        log.warning(
            "step %d skipped: loss %s, gradient norm %s; the weights are as before. %s",
            step,
            window.loss,
            window.grad_norm,
            first_non_finite(gradient.view, gradient.objective, batches, window.gradients),
        )
        if self.progress.skipped_in_a_row < MAX_SKIPPED_IN_A_ROW:
            return
        raise GuardStop(
            f"stopped: the gradients of steps {step - MAX_SKIPPED_IN_A_ROW + 1} to {step} were not finite. "
            f"None of them was applied and the checkpoints in {self.store.root} are intact. A lower "
            "optimizer.lr, trainer.clip_norm above 0 or model.dtype=float32 may help; look at the rows of "
            "these steps too"
        )

    def _validate_if_due(self) -> None:
        """Validates at the start, every eval_every steps and at the end, once each, resumed or not."""
        progress, every = self.progress, self.config.trainer.eval_every
        due = progress.step == self.total_steps or (every and progress.step % every == 0)
        if self.validate is None or not due or progress.validated_step >= progress.step:
            return
        record = {"kind": "valid", "step": progress.step, **self.validate()}
        progress.validated_step = progress.step
        best = progress.best_loss
        limit = math.inf if best is None else best - self.config.trainer.min_delta
        if record["loss"] < limit:
            progress.best_loss, progress.best_step = record["loss"], progress.step
            progress.without_improvement = 0
            self.best.save(progress.step)
        else:
            progress.without_improvement += 1
        record["best"] = progress.best_step == progress.step
        self.metrics.write(record)
        self.screen.valid(record)

    def _should_stop_early(self) -> bool:
        patience = self.config.trainer.patience
        return bool(patience) and self.progress.without_improvement >= patience

    def _is_due(self, every: int) -> bool:
        return bool(every) and self.progress.step % every == 0

    def _save(self) -> None:
        """Writes the checkpoint of the present step, unless it is there."""
        progress = self.progress
        if progress.step == self.saved_step:
            return
        self._check_weights()
        self.metrics.sync()
        arrays = None if self.config.trainer.save_only_adapter else self.stepper.update.state()
        state = {**asdict(progress), **self.identity, **self.windows.state()}
        self.store.save(state, arrays, self.write_adapter)
        self.saved_step = progress.step

    def _check_weights(self) -> None:
        """Finite gradients can still make weights that are not, with a learning rate beyond all reason."""
        params = tree_flatten(self.stepper.gradient.view.model.trainable_parameters())
        finite = mx.stack([mx.isfinite(array).all() for _, array in params]).tolist()
        spoilt = [name for (name, _), good in zip(params, finite, strict=True) if not good]
        if spoilt:
            raise GuardStop(
                f"stopped: after step {self.progress.step} there are weights that are not finite "
                f"({len(spoilt)} arrays, first {spoilt[0]}). They were not saved and the checkpoints in "
                f"{self.store.root} are intact. Lower optimizer.lr"
            )

    def _interrupted(self) -> None:
        step = self.progress.step
        if not step:
            raise Interrupted("interrupted: no step was done yet", self.stop.signum)
        self._save()
        where = self.store.folder(step)
        how = "go on with trainer.resume=auto"
        if self.config.trainer.save_only_adapter:
            how = f"a new run goes on from it with adapter.init_from={where}"
        raise Interrupted(f"interrupted: saved step {step} in {where}; {how}", self.stop.signum)
