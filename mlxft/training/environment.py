"""environment.json: what a run ran on, for whoever compares its figures later."""

import importlib.metadata
import os
import platform
import subprocess
from typing import Any

import mlx.core as mx

import mlxft
from mlxft import blas
from mlxft.backend import backend

_PACKAGES = ("mlx", "mlx-lm", "hydra-core", "transformers", "tokenizers", "datasets", "numpy")


def describe() -> dict[str, Any]:
    """Returns versions, device, BLAS, processor count and the git commit of the current folder."""
    return {
        "mlxft": mlxft.__version__,
        "python": platform.python_version(),
        "packages": {name: importlib.metadata.version(name) for name in _PACKAGES},
        "platform": platform.platform(),
        "machine": platform.machine(),
        "processors": os.cpu_count(),
        "backend": backend(),
        "device": _jsonable(mx.device_info()) if hasattr(mx, "device_info") else str(mx.default_device()),
        "blas": str(blas.preload()),
        "git_commit": _git_commit(),
    }


def _jsonable(info: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in info.items() if isinstance(value, (str, int, float))}


def _git_commit() -> str:
    try:
        found = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, timeout=5)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return found.stdout.strip()
