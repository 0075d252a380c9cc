"""best/: the adapter of the best validation so far, and best.json, which says of which step it is."""

import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Optional

from mlxft.errors import InputError
from mlxft.training.checkpoint import MANIFEST, OPTIMIZER, STATE, CheckpointStore, read
from mlxft.training.disk import as_json, disk_guard, write_whole

log = logging.getLogger("mlxft")

_STEP = "best.json"
_NOT_OF_ADAPTER = (_STEP, MANIFEST, OPTIMIZER, STATE)  # files beside one


class BestAdapter:
    """Keeps best/ of a run. write_adapter: writes the present adapter into a folder."""

    def __init__(self, run_dir: Path, write_adapter: Callable[[Path], None]):
        self._run_dir = run_dir
        self._folder = run_dir / "best"
        self._write_adapter = write_adapter

    def save(self, step: int) -> None:
        """Writes the present adapter as the best, of this step. Raises: GuardStop if the disk is full."""
        with disk_guard(self._folder):
            (self._folder / _STEP).unlink(missing_ok=True)  # from here on it is no step's, until it is whole
            self._write_adapter(self._folder)
        write_whole(self._folder / _STEP, as_json({"step": step}))

    def restore(self, step: Optional[int], from_run: Optional[Path]) -> None:
        """Sees to it that best/ is that of `step`, the best one of the checkpoint that is continued.

        best/ may be of a later step, which will be taken again, or lie in the other run `from_run`. It
        is found there or among the checkpoints; if it is in neither, a warning says so.
        """
        if step is None or _step_of(self._folder) == step:
            return
        source = _find(step, [self._run_dir] if from_run is None else [from_run])
        with disk_guard(self._folder):
            if self._folder.exists():
                shutil.rmtree(self._folder)
            if source is not None:
                self._folder.mkdir()
                for file in source.iterdir():
                    if file.name not in _NOT_OF_ADAPTER:
                        shutil.copy(file, self._folder)
                write_whole(self._folder / _STEP, as_json({"step": step}))
                return
        log.warning(
            "the adapter of step %d, the best so far, is gone: best/ is written at the next better one", step
        )


def _step_of(folder: Path) -> Optional[int]:
    try:
        return json.loads((folder / _STEP).read_bytes())["step"]
    except (OSError, ValueError, KeyError, TypeError):  # none, or one that a kill left unfinished
        return None


def _find(step: int, runs: list[Path]) -> Optional[Path]:
    for run_dir in runs:
        if _step_of(run_dir / "best") == step:
            return run_dir / "best"
        checkpoint = CheckpointStore(run_dir).folder(step)
        try:
            return read(checkpoint).folder
        except InputError:
            continue
    return None
