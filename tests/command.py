"""`mlxft` as a process of its own."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MLXFT = [sys.executable, "-m", "mlxft"]


def environment(**changes: str) -> dict[str, str]:
    """Returns this process's variables, by which mlxft is found from any folder, with `changes`."""
    return os.environ | {"PYTHONPATH": str(ROOT)} | changes


def mlxft(
    *arguments: str, folder: Path | None = None, timeout: float = 120, **options
) -> subprocess.CompletedProcess:
    """Runs the command, in `folder` if one is given, and returns its exit code and what it printed, as text.

    options: of `subprocess.run`, in place of these.
    """
    usual = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "env": environment()}
    return subprocess.run([*MLXFT, *arguments], cwd=folder, timeout=timeout, **usual | options)
