"""The folder that an export goes to: written beside it, and there at once or not at all."""

import glob
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mlxft.errors import GuardStop, InputError
from mlxft.training.disk import sync_folder

_SPARE = 64 << 20  # bytes that the disk keeps: configuration, tokenizer, and other programs


def check_out(out: Path) -> None:
    """Raises InputError if `out` is there and no empty folder, or cannot be made."""
    if out.is_symlink() and not out.exists():
        raise InputError(f"out={out} is a link that leads nowhere. Give a folder that is new or empty")
    if out.exists() and not out.is_dir():
        raise InputError(f"out={out} is a file. Give a folder that is new or empty")
    if out.is_dir() and (names := sorted(os.listdir(out))):
        raise InputError(
            f"out={out} is not empty: it holds {', '.join(names[:5])}. Nothing was written there. Give a "
            "folder that is new or empty"
        )
    place = _existing(out)
    of_this_user = os.access in os.supports_effective_ids
    if not os.access(place, os.W_OK | os.X_OK, effective_ids=of_this_user):
        raise InputError(f"out={out} cannot be written: no permission to make files in {place}")


def check_space(out: Path, num_bytes: int) -> None:
    """Raises GuardStop if the disk that `out` is on has no room for so many bytes."""
    free = shutil.disk_usage(_existing(out)).free
    if num_bytes + _SPARE > free:
        raise GuardStop(
            f"out={out}: {num_bytes / 1e9:.2f} GB are to be written, and {free / 1e9:.2f} GB are free there. "
            "Free some space, or give a folder on another disk"
        )


@contextmanager
def staged(out: Path) -> Iterator[Path]:
    """Gives a folder to write into, which becomes `out` when the block ends well, and goes otherwise."""
    made = [folder for folder in (out.parent, *out.parent.parents) if not folder.exists()]
    aside = out.parent / f".{out.name}.{os.getpid()}"
    try:
        _remove_left_over(out)
        aside.mkdir(parents=True)
        yield aside
        for file in sorted(aside.rglob("*")):
            if file.is_file():
                with open(file, "rb") as handle:
                    os.fsync(handle.fileno())
        sync_folder(aside)
        check_out(out)  # somebody may have come meanwhile
        os.replace(aside, out)
        sync_folder(out.parent)
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        for folder in made:
            if folder.is_dir() and not any(folder.iterdir()):
                folder.rmdir()
        raise


def _remove_left_over(out: Path) -> None:
    """Removes what processes that were killed have left beside `out`."""
    for folder in out.parent.glob(f".{glob.escape(out.name)}.*"):
        number = folder.name.rpartition(".")[2]
        if number.isdecimal() and not _is_running(int(number)):
            shutil.rmtree(folder, ignore_errors=True)


def _is_running(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # somebody else's
        return True
    return process != os.getpid()


def _existing(path: Path) -> Path:
    return next(folder for folder in (path.absolute(), *path.absolute().parents) if folder.is_dir())
