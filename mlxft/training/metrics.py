"""Files of one JSON object a line, a run's own record; a resume cuts them back to its step."""

import json
import logging
import math
import os
from pathlib import Path
from typing import Any

from mlxft.training.disk import disk_guard, write_all, write_whole

log = logging.getLogger("mlxft")


class MetricsFile:
    """Appends lines to metrics.jsonl. Values that JSON has no number for are written as null."""

    def __init__(self, path: Path, from_step: int = 0):
        """Opens the file, dropping lines of steps after `from_step`, which will be taken again.

        Raises: GuardStop if the disk takes no more.
        """
        if from_step and not path.exists():
            log.warning("%s is missing: it starts anew with step %d", path, from_step + 1)
        kept = _lines_up_to(path, from_step) if from_step and path.exists() else []
        self._path = path
        write_whole(path, b"".join(kept))
        with disk_guard(path):
            self._file = open(path, "ab", buffering=0)

    def write(self, record: dict[str, Any]) -> None:
        """Appends one record as a line and hands it to the operating system. Raises: GuardStop."""
        line = json.dumps({key: _finite(value) for key, value in record.items()}) + "\n"
        with disk_guard(self._path):
            write_all(self._file, line.encode())

    def sync(self) -> None:
        """Waits until the disk has every line, before a checkpoint says so. Raises: GuardStop."""
        with disk_guard(self._path):
            os.fsync(self._file.fileno())

    def close(self) -> None:
        """Closes the file."""
        self._file.close()


def _lines_up_to(path: Path, step: int) -> list[bytes]:
    kept = []
    for line in path.read_bytes().splitlines(keepends=True):
        try:
            record = json.loads(line)
        except ValueError:  # a line that a kill or a full disk cut short
            continue
        # The validation of the starting point stands before step 1 and is not run again.
        if isinstance(record, dict) and record.get("step", math.inf) <= step:
            kept.append(line if line.endswith(b"\n") else line + b"\n")
    return kept


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value
