"""Where the packaged folders are: configs, recipes and kernels, installed or in a checkout."""

from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent


def folder(name: str) -> Path:
    """Returns the folder `name` ("configs", "recipes" or "kernels").

    A wheel carries the folders inside the package; a checkout has them beside it.
    """
    installed = _PACKAGE / name
    return installed if installed.is_dir() else _PACKAGE.parent / name


def bundled_data(name: str) -> Path:
    """Returns the path of a data file that comes with mlxft, written `bundled:NAME` in a config."""
    return folder("recipes") / "data" / name
