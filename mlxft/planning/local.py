"""Where a model's files are on this machine; a plan fetches nothing."""

from pathlib import Path
from typing import Optional

from mlxft.errors import InputError
from mlxft.hub import ANSWERS_WITHIN_S
from mlxft.models import packaged
from mlxft.models.resolve import PATTERNS, checked_folder, has_weights, is_hub_id
from mlxft.sizes import written


def local_folder(path: str, revision: Optional[str] = None, key: str = "model.path") -> Path:
    """Returns the folder of the model that `path` names, if it is on this machine.

    Raises: InputError for what is no model, and for one on the hub with what training would fetch.
    """
    folder = Path(path).expanduser()
    if folder.exists() or not is_hub_id(path):
        return checked_folder(folder, key)
    package = None if revision else packaged.package_of(path)
    if package and (made := packaged.existing(package)):
        return made
    cached = _cached(path, revision)
    if cached is None:
        raise InputError(
            f"{key}: {path} is not on this machine, and a plan fetches nothing. {_to_fetch(path, revision)}"
        )
    return checked_folder(cached, key)


def _cached(hub_id: str, revision: Optional[str]) -> Optional[Path]:
    """Returns the snapshot in the hub's cache, None without one that has weights."""
    from huggingface_hub import snapshot_download

    try:
        cached = Path(
            snapshot_download(hub_id, revision=revision, allow_patterns=PATTERNS, local_files_only=True)
        )
    except (OSError, ValueError):
        return None
    return cached if has_weights(cached) else None


def _to_fetch(hub_id: str, revision: Optional[str]) -> str:
    """Returns, as sentences, what training would fetch, and how to have it before."""
    from fnmatch import fnmatch

    from huggingface_hub import HfApi

    how = f"hf download {hub_id} fetches it, as does mlxft train"
    try:
        about = HfApi().model_info(
            hub_id, revision=revision, files_metadata=True, timeout=ANSWERS_WITHIN_S
        )
    except Exception as error:  # whatever the hub's client raises
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        return f"{how}, but the hub does not say how large it is: {reason}"
    wanted = [file for file in about.siblings or [] if any(fnmatch(file.rfilename, p) for p in PATTERNS)]
    size = sum(file.size or 0 for file in wanted)
    return f"{how}: {len(wanted)} files of {written(size)} together"
