"""Weights & Biases and TensorBoard beside metrics.jsonl: they follow a run, and never stop it.

A run that is continued in its folder continues the same W&B run; TensorBoard drops what was logged after
the checkpoint. Both get the records of metrics.jsonl: `train/loss`, `valid/loss`, `train/lr`, ...
"""

import json
import logging
import math
import os
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any, Optional, Protocol

from mlxft.config.schema import LoggerConfig
from mlxft.errors import InputError
from mlxft.training.disk import as_json, write_whole
from mlxft.training.metrics import MetricsFile

log = logging.getLogger("mlxft")

IDENTITY = "trackers.json"  # what a continued run has to know of its trackers


class Tracker(Protocol):
    """Where records go."""

    def write(self, values: Mapping[str, float], step: int) -> None:
        """Takes the numbers of one record."""

    def close(self) -> None:
        """Ends the run there."""


class Tracked:
    """metrics.jsonl with trackers behind it: a record is on the disk before any of them sees it."""

    def __init__(self, file: MetricsFile, trackers: dict[str, Tracker]):
        self._file, self._trackers = file, trackers

    def write(self, record: dict[str, Any]) -> None:
        """Appends a record, as `MetricsFile.write`; a tracker that fails is left out from there on."""
        self._file.write(record)
        step, values = record["step"], _numbers(record)
        for name in list(self._trackers):
            try:
                self._trackers[name].write(values, step)
            except Exception as error:
                log.warning("logger.%s gets nothing after step %d: %s", name, step - 1, error)
                del self._trackers[name]

    def sync(self) -> None:
        """As `MetricsFile.sync`."""
        self._file.sync()


def _numbers(record: Mapping[str, Any]) -> dict[str, float]:
    """Returns {"train/loss": ...}: the record's finite numbers but its step."""
    kind = record["kind"]
    return {
        f"{kind}/{key}": float(value)
        for key, value in record.items()
        if key != "step" and isinstance(value, int | float) and math.isfinite(value)
    }


@contextmanager
def tracked(
    file: MetricsFile, config: Mapping[str, Any], run_dir: Path, name: str, step: int
) -> Iterator[Tracked]:
    """Gives the file with the trackers that config["logger"] names.

    name: of the run's kind. step: after which a continued run goes on. A tracker that can't begin is left
    out.
    """
    settings = LoggerConfig(**config["logger"])
    wanted: dict[str, Callable[[], Tracker]] = {}
    if settings.tensorboard:
        wanted["tensorboard"] = lambda: _TensorBoard(run_dir, step)
    if settings.wandb:
        wanted["wandb"] = lambda: _Wandb(settings, config, run_dir, name)
    trackers: dict[str, Tracker] = {}
    for called, begin in wanted.items():
        try:
            trackers[called] = begin()
        except Exception as error:
            log.warning("logger.%s gets nothing of this run: %s", called, error)
    begun = list(trackers.items())
    try:
        yield Tracked(file, trackers)
    finally:
        for called, tracker in begun:
            try:
                tracker.close()
            except Exception as error:
                log.warning("logger.%s did not end well: %s", called, error)


def check(settings: LoggerConfig) -> None:
    """Raises: InputError for trackers that can't be used, before anything is loaded."""
    if settings.tensorboard:
        _imported("tensorboardX", "tensorboard")
    if settings.wandb:
        wandb = _imported("wandb", "wandb")
        if _mode(settings) == "online" and not wandb.login(prompt=False, verify=False):
            raise InputError(
                "logger.wandb: nobody is logged in to Weights & Biases; run wandb login, or keep the run's "
                "records on this disk with logger.offline=true (wandb sync uploads them later)"
            )


def _imported(module: str, extra: str) -> Any:
    try:
        return import_module(module)
    except ImportError:
        raise InputError(f"logger.{extra}: {module} is missing; pip install 'mlxft[{extra}]'") from None


def _mode(settings: LoggerConfig) -> str:
    return "offline" if settings.offline else os.environ.get("WANDB_MODE", "online")


class _TensorBoard:
    """Event files in the run's folder. step: later ones, of before an interruption, are dropped."""

    def __init__(self, run_dir: Path, step: int):
        writer = _imported("tensorboardX", "tensorboard").SummaryWriter
        # Files are named by the second: one that begins again within it would take the first one's place.
        self._writer = writer(
            str(run_dir / "tensorboard"),
            purge_step=step + 1 if step else None,
            filename_suffix=f".{step:09d}",
        )

    def write(self, values: Mapping[str, float], step: int) -> None:
        """Adds a point to each value's curve."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        """Writes what is left."""
        self._writer.close()


class _Wandb:
    """A W&B run whose number is kept in the run's folder, where a continued run finds it."""

    def __init__(self, settings: LoggerConfig, config: Mapping[str, Any], run_dir: Path, name: str):
        wandb = _imported("wandb", "wandb")
        known: Optional[str] = None
        if (run_dir / IDENTITY).exists():
            known = json.loads((run_dir / IDENTITY).read_text(encoding="utf-8"))["wandb"]
        number = known or uuid.uuid4().hex[:8]
        self._run = wandb.init(
            project=settings.project,
            entity=settings.entity,
            group=settings.group,
            tags=settings.tags or None,
            name=settings.name or run_dir.name,
            job_type=name,
            id=number,
            resume="allow",
            dir=str(run_dir),
            mode=_mode(settings),
            config=dict(config),
            settings=wandb.Settings(silent=True),
        )
        self._run.define_metric("*", step_metric="step")
        write_whole(run_dir / IDENTITY, as_json({"wandb": number}))

    def write(self, values: Mapping[str, float], step: int) -> None:
        """Adds a row to the run's history; its own steps, unlike ours, may not go back."""
        self._run.log({"step": step, **values})

    def close(self) -> None:
        """Ends the run there."""
        self._run.finish()
