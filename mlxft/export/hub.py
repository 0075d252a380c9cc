"""An exported folder put into a repository of the Hugging Face hub."""

import logging
from pathlib import Path
from typing import Optional

from mlxft.errors import GuardStop, InputError

log = logging.getLogger("mlxft")


class NotUploaded(GuardStop):
    """The hub did not take the folder; what was exported is whole and on the disk."""


def check_login(repository: str) -> None:
    """Raises InputError if nobody is logged in, or the hub does not know who that is."""
    from huggingface_hub import HfApi, constants, errors, get_token

    if constants.HF_HUB_OFFLINE:
        raise InputError(
            f"hub={repository}: HF_HUB_OFFLINE is set, so nothing can be uploaded. Leave hub out"
        )
    if get_token() is None:
        raise InputError(f"hub={repository}: nobody is logged in to the hub; hf auth login does it")
    try:
        HfApi().whoami()
    except errors.HfHubHTTPError as error:
        raise InputError(f"hub={repository}: the hub refuses the login: {_in_a_line(error)}") from error
    except Exception as error:  # whatever its HTTP client raises
        raise InputError(f"hub={repository}: the hub cannot be reached: {_in_a_line(error)}") from error


def upload(folder: Path, repository: str, private: Optional[bool]) -> str:
    """Puts all files of `folder` into the repository, made if it is not there, and returns the address.

    private: of a new repository; None for what the account has set. Raises: NotUploaded.
    """
    from huggingface_hub import HfApi

    api = HfApi()
    try:
        api.create_repo(repository, private=private, exist_ok=True)
        done = api.upload_folder(repo_id=repository, folder_path=folder, commit_message="Export from mlxft")
    except Exception as error:  # whatever its HTTP client raises
        raise NotUploaded(
            f"hub={repository}: the upload failed: {_in_a_line(error)}. The export is in {folder}; "
            f"hf upload {repository} {folder} tries again"
        ) from error
    return str(done)


def _in_a_line(error: BaseException) -> str:
    """Returns what the hub's client says, which may be several lines, in one."""
    return " ".join(str(error).split()) or type(error).__name__
