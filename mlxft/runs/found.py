"""Runs as they lie on the disk: how each stands, and what it was configured with."""

import json
import math
import os
import time
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Optional

import yaml

from mlxft.config.keys import flatten, keys_of
from mlxft.config.schema import Config
from mlxft.errors import InputError
from mlxft.sweeps.store import SWEEP
from mlxft.training.folder import ROOT, SUMMARY
from mlxft.training.hold import CONFIG, LOCK, is_taken

SCHEMA = keys_of(Config)


@dataclass(frozen=True)
class Run:
    """A run's folder. config: by full key name."""

    folder: Path
    config: dict[str, Any] = field(repr=False)

    @cached_property
    def summary(self) -> dict[str, Any]:
        """What the run wrote at its end; {} before it."""
        try:
            return json.loads((self.folder / SUMMARY).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}

    @cached_property
    def last(self) -> dict[str, dict[str, Any]]:
        """The last record of metrics.jsonl of each kind."""
        found: dict[str, dict[str, Any]] = {}
        try:
            with open(self.folder / "metrics.jsonl", encoding="utf-8") as file:
                for line in file:
                    record = json.loads(line)
                    found[record["kind"]] = record
        except (OSError, ValueError, KeyError):
            pass  # of a run at work the last line may be half of one
        return found

    @property
    def status(self) -> str:
        """running, completed, early_stopped, or unfinished: it was stopped, and may go on."""
        if is_taken(self.folder):
            return "running"
        return self.summary.get("status", "unfinished")

    @property
    def started(self) -> float:
        """When it began, in seconds: the time of what it writes once."""
        return (self.folder / CONFIG).stat().st_mtime

    @cached_property
    def num_bytes(self) -> int:
        """What the folder takes on the disk."""
        return sum(path.lstat().st_size for path in self.folder.rglob("*") if path.is_file())

    def values(self) -> dict[str, Any]:
        """Returns what runs are sorted and chosen by: results, and every key of the configuration."""
        train, valid, summary = self.last.get("train", {}), self.last.get("valid", {}), self.summary
        return self.config | {
            "status": self.status,
            "steps": train.get("step", 0),
            "loss": summary.get("loss", train.get("loss")),
            "best_loss": summary.get("best_loss", valid.get("loss")),
            "seconds": summary.get("seconds"),
            "tokens_per_s": train.get("tokens_per_s"),
            "peak_bytes": train.get("peak_bytes"),
            "started": time.strftime("%Y-%m-%d %H:%M", time.localtime(self.started)),
            "bytes": self.num_bytes,
        }


RESULTS = (
    "status", "steps", "loss", "best_loss", "seconds", "tokens_per_s", "peak_bytes", "started", "bytes",
)  # fmt: skip


def find(places: list[str]) -> list[Run]:
    """Returns the runs in the folders, each of which may be one itself; without any, those in runs/.

    Raises: InputError for a folder that is not there or has no run in it.
    """
    runs: dict[Path, Run] = {}
    for place in map(Path, places or [str(ROOT)]):
        if places and not place.is_dir():
            raise InputError(f"there is no folder {place}")
        found = [run for folder in _folders(place) if (run := read(folder)) is not None]
        if places and not found:
            raise InputError(f"{place} has no run in it")
        runs |= {run.folder: run for run in found}
    return sorted(runs.values(), key=lambda run: run.started)


def _folders(place: Path) -> list[Path]:
    found = []
    for folder, names, files in os.walk(place):
        if CONFIG in files and LOCK in files:
            found.append(Path(folder))
            names.clear()  # a run has no other in it
    return found


def read(folder: Path) -> Optional[Run]:
    """Returns the run in a folder, None if there is none that can be read."""
    try:
        values = yaml.safe_load((folder / CONFIG).read_text(encoding="utf-8"))
        return Run(folder, flatten(values, SCHEMA)) if (folder / LOCK).exists() else None
    except (OSError, ValueError, AttributeError, yaml.YAMLError):
        return None


def sweep_of(folder: Path) -> Optional[Path]:
    """Returns the folder of the sweep that a run is a job of."""
    return folder.parent if (folder.parent / SWEEP).exists() else None


def order(value: Any) -> tuple:
    """Returns what sorts values of any type: numbers, then texts, then what is missing."""
    if isinstance(value, int | float) and math.isfinite(value):
        return 0, value, ""
    return (2, 0, "") if value is None else (1, 0, str(value))
