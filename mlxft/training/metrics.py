"""metrics.jsonl: one object a line, the run's own record; a resume cuts it back to its step."""

import json
import math
import os
from pathlib import Path
from typing import Any


class MetricsFile:
    """Appends lines to metrics.jsonl. Values that JSON has no number for are written as null."""

    def __init__(self, path: Path, from_step: int = 0):
        """Opens the file, dropping lines of steps after `from_step`, which will be taken again."""
        kept = _lines_up_to(path, from_step) if from_step and path.exists() else []
        aside = path.with_name(f".{path.name}")
        aside.write_text("".join(kept), encoding="utf-8")
        os.replace(aside, path)
        self._file = open(path, "a", encoding="utf-8")

    def write(self, record: dict[str, Any]) -> None:
        """Appends one record as a line and hands it to the operating system."""
        self._file.write(json.dumps({key: _finite(value) for key, value in record.items()}) + "\n")
        self._file.flush()

    def sync(self) -> None:
        """Waits until the disk has every line: before a checkpoint says that they exist."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Closes the file."""
        self._file.close()


def _lines_up_to(path: Path, step: int) -> list[str]:
    kept = []
    for line in path.read_text(encoding="utf-8").splitlines(keepends=True):
        try:
            record = json.loads(line)
        except ValueError:  # a line that a kill cut short
            continue
        # The validation of the starting point stands before step 1 and is not run again.
        if record["step"] <= step:
            kept.append(line)
    return kept


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value
