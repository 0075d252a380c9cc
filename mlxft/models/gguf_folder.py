"""The model folder that is made of a GGUF file, once for each content, and kept in the cache."""

import logging
import os
import shutil
from pathlib import Path

from mlxft.errors import InputError
from mlxft.models.packaged import alone, sha256

log = logging.getLogger("mlxft")

_VERSION = 1  # bumped when the same file becomes another folder


def folder_of(gguf: Path) -> Path:
    """Returns the folder with the file's model as bfloat16 safetensors, made now if it isn't there yet.

    It is made beside the final one and renamed when complete. Raises: InputError naming the file.
    """
    from mlxft.models.gguf_weights import convert

    try:
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        folder = cache / "mlxft" / "models" / f"{gguf.stem}-gguf{_VERSION}-{sha256(gguf)[:16]}"
        with alone(folder):
            if not folder.is_dir():
                partial = folder.with_name(folder.name + ".partial")
                shutil.rmtree(partial, ignore_errors=True)  # what an interrupted process left
                partial.mkdir()
                log.info("converting %s", gguf)
                convert(gguf, partial)
                partial.rename(folder)
    except OSError as error:
        raise InputError(f"model.path: a model folder could not be made of {gguf}: {error}") from error
    log.info("%s: its weights in bfloat16: %s", gguf, folder)
    return folder
