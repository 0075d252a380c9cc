"""Deletes runs: only what is a run or a sweep, is not at work, and nothing else stands on."""

import fcntl
import os
import shutil
from contextlib import ExitStack
from pathlib import Path

from mlxft.errors import InputError
from mlxft.runs.found import Run, find, read, sweep_of
from mlxft.sweeps.store import SWEEP
from mlxft.training.folder import ROOT
from mlxft.training.hold import LOCK, is_taken

_NAMES_FOLDERS = ("adapter.init_from", "model.path", "loss.reference", "trainer.resume", "data.train")


def check(folders: list[Path]) -> list[Run]:
    """Returns all runs in folders that may be deleted, each a run or a whole sweep.

    Raises: InputError naming the first that may not, and why.
    """
    gone = [run for folder in folders for run in _runs_in(folder)]
    going = {run.folder.resolve() for run in gone}
    named = {folder.resolve() for folder in folders}
    for folder in (run.folder for run in gone):
        if is_taken(folder):
            raise InputError(f"{folder}: a process trains there now; stop it first")
        sweep = sweep_of(folder)
        if sweep is not None and sweep.resolve() not in named:
            raise InputError(f"{folder} is a job of the sweep {sweep}; delete all of that, or none")
    others = [run for run in find([]) if run.folder.resolve() not in going] if ROOT.is_dir() else []
    for other in others:
        for key, path in _paths(other):
            if any(path.is_relative_to(folder) for folder in going):
                raise InputError(f"{path} is {key} of {other.folder}, which could not go on without it")
    return gone


def _runs_in(folder: Path) -> list[Run]:
    if not folder.is_dir():
        raise InputError(f"there is no folder {folder}")
    if (folder / SWEEP).exists():
        if is_taken(folder):
            raise InputError(f"{folder}: the sweep is at work; stop it first")
        return [run for path in sorted(folder.iterdir()) if (run := read(path)) is not None]
    run = read(folder)
    if run is None:
        raise InputError(f"{folder} is not the folder of a run or a sweep; nothing was deleted")
    return [run]


def _paths(run: Run) -> list[tuple[str, Path]]:
    """Returns the folders that a run's configuration names, by key."""
    found = []
    for key in _NAMES_FOLDERS:
        value = run.config.get(key)
        for each in value if isinstance(value, list) else [value]:
            if isinstance(each, str) and Path(each).exists():
                found.append((key, Path(each).resolve()))
    return found


def delete(folder: Path) -> None:
    """Deletes a folder. It is moved aside first: what is left of an interrupted deletion is no half run."""
    with ExitStack() as held:
        lock = held.enter_context(open(folder / LOCK))
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise InputError(f"{folder}: a process trains there now; stop it first") from None
        aside = folder.with_name(f".{folder.name}.deleted")
        try:
            os.replace(folder, aside)
            shutil.rmtree(aside)
        except OSError as error:
            raise InputError(f"{folder} could not be deleted: {error.strerror}") from None
