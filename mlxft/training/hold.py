"""Holding a run's folder: one process at a time writes it, and what mlxft says goes to its log."""

import fcntl
import logging
import os
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Optional

from mlxft.errors import InputError
from mlxft.training.disk import write_all

log = logging.getLogger("mlxft")

CONFIG = "config.yaml"
LOG = "train.log"
LOCK = ".lock"


class Taken(InputError):
    """Another process holds the folder."""


@contextmanager
def locked(run_dir: Path):
    """Holds the run's lock within the block; the system drops it when the process ends, however it ends."""
    try:
        new_files = [run_dir / name for name in (LOG, LOCK) if not (run_dir / name).exists()]
        new_folders = [path for path in (run_dir, *run_dir.parents) if not path.exists()]
        run_dir.mkdir(parents=True, exist_ok=True)
        _check_writable(run_dir)
        file = open(run_dir / LOCK, "w")
    except OSError as error:
        is_file = isinstance(error, FileExistsError | NotADirectoryError)
        reason = _dangling(run_dir) or ("there is a file of that name" if is_file else error.strerror)
        raise InputError(f"run.dir={run_dir} cannot be written: {reason}. Choose another run.dir") from None
    with file:
        _lock(file, run_dir)
        try:
            yield
        finally:
            if not (run_dir / CONFIG).exists():  # it never began
                _remove(new_files, new_folders)


def _check_writable(run_dir: Path) -> None:
    """Raises InputError where the first file, or the first checkpoint, could not be made: not hours later."""
    of_this_user = os.access in os.supports_effective_ids
    for folder in (run_dir, run_dir / "checkpoints"):
        if folder.is_dir() and not os.access(folder, os.W_OK | os.X_OK, effective_ids=of_this_user):
            raise InputError(
                f"run.dir={run_dir} cannot be written: no permission to make files in {folder}. Allow that, "
                "or choose another run.dir"
            )


def _dangling(run_dir: Path) -> Optional[str]:
    """Returns what to say of a link on the way to the folder that leads nowhere, None if there is none."""
    for path in (run_dir, *run_dir.parents):
        if os.path.islink(path) and not os.path.exists(path):
            return f"{path} is a link to {os.readlink(path)}, which is not there"
    return None


def _lock(file: Any, run_dir: Path) -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # One that failed to begin may have removed the file between our opening and locking it.
        if os.path.samestat(os.fstat(file.fileno()), os.stat(run_dir / LOCK)):
            return
    except (BlockingIOError, FileNotFoundError):
        pass
    except OSError as error:
        raise InputError(
            f"run.dir={run_dir} cannot be locked: {error.strerror}. Choose a run.dir on another disk"
        ) from None
    raise Taken(f"another process trains in {run_dir} now. Wait for it, or choose another run.dir")


def is_taken(run_dir: Path) -> bool:
    """Tells whether a process holds the run's lock; for a moment it is asked for, and dropped at once."""
    try:
        with open(run_dir / LOCK) as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # no lock, or none to be had here: nobody is known to be in it
        return False
    return False


def _remove(files: list[Path], folders: list[Path]) -> None:
    for file in files:
        file.unlink(missing_ok=True)
    for folder in folders:
        if any(folder.iterdir()):
            return
        folder.rmdir()


class _RunLog(logging.Handler):
    """Appends to train.log. A disk that takes no more ends the log, with a sentence, and not the run."""

    def __init__(self, path: Path):
        super().__init__()
        self.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
        self._path = path
        self._file = open(path, "ab", buffering=0)

    def emit(self, record: logging.LogRecord) -> None:
        if self._file.closed:
            return
        try:
            write_all(self._file, (self.format(record) + "\n").encode(errors="backslashreplace"))
        except OSError as error:
            self._file.close()
            print(f"{self._path} could not be written: {error.strerror}; the log ends here", file=sys.stderr)

    def close(self) -> None:
        self._file.close()
        super().close()


@contextmanager
def logged(path: Path):
    try:
        handler = _RunLog(path)
    except OSError as error:
        raise InputError(f"{path} cannot be written: {error.strerror}. Choose another run.dir") from None
    level = log.level
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    try:
        yield
    finally:
        log.setLevel(level)
        log.removeHandler(handler)
        handler.close()
