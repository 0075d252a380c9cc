"""Writing into a run's folder: files whole or as they were, what stops a write told in a sentence."""

import errno
import json
import os
import re
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, Optional, Union

import mlx.core as mx

from mlxft.errors import GuardStop

# How MLX begins what it says of a file that it could not write.
_OF_MLX = re.compile(r"\[(write|save\w*)\]")


_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_FORBIDDEN = (errno.EACCES, errno.EPERM, errno.EROFS)


@contextmanager
def disk_guard(
    what: Union[str, Path],
    kept: str = "Earlier checkpoints are intact",
    then: str = "continue with trainer.resume=auto",
):
    """Makes of a write that fails within the block a GuardStop that names `what`.

    kept, then: what the message says of that which is there, and what to do once it can be written.
    """
    try:
        yield
    except (OSError, RuntimeError) as error:
        if not isinstance(error, OSError) and not _OF_MLX.match(str(error)):
            raise
        reason = getattr(error, "strerror", None) or error
        raise GuardStop(
            f"{what} could not be written: {reason}. {kept}; {_remedy(error)}, then {then}"
        ) from error


def _remedy(error: Union[OSError, RuntimeError]) -> str:
    number = getattr(error, "errno", None)
    if number in _FORBIDDEN:
        return "give this user the permission to write there"
    if number is None or number in _FULL:  # MLX gives no number
        return "free some space"
    return "put that right"


def write_whole(path: Path, content: Union[str, bytes]) -> None:
    """Puts a file of this content in place of the old one: a reader, or a kill, finds either.

    Raises: GuardStop if it cannot be written; the old file is as it was.
    """
    aside = path.with_name(f".{path.name}")
    with disk_guard(path):
        try:
            with open(aside, "wb", buffering=0) as file:
                write_all(file, content.encode() if isinstance(content, str) else content)
                os.fsync(file.fileno())
            os.replace(aside, path)
            sync_folder(path.parent)
        except OSError:
            aside.unlink(missing_ok=True)
            raise


def write_all(file: BinaryIO, content: bytes) -> None:
    """Writes all of it to a file that was opened without a buffer. Raises: OSError.

    Nothing waits in a buffer, so nothing fails a second time when the file is closed.
    """
    while content:
        content = content[file.write(content) :]


def as_json(value: Any) -> str:
    """Returns JSON as it stands in a run's folder."""
    return json.dumps(value, indent=1) + "\n"


def write_json(path: Path, value: Any) -> None:
    """Writes JSON and waits until the disk has it. Raises: OSError."""
    with open(path, "wb", buffering=0) as file:
        write_all(file, as_json(value).encode())
        os.fsync(file.fileno())


def write_arrays(path: Path, arrays: dict[str, mx.array], notes: Optional[dict[str, str]] = None) -> None:
    """Writes arrays, and notes, as safetensors and waits until the disk has them. Raises: OSError."""
    with open(path, "wb") as file:
        mx.save_safetensors(file, arrays, {"format": "mlx"} | (notes or {}))
        file.flush()
        os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Waits until the disk has the names in `folder`."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
