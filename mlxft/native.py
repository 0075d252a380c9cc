"""Small libraries in C that are compiled on the machine they run on, once, and kept.

They are for processors only. Nothing heavy is imported here: one of them is needed before MLX is.
"""

import os
from collections.abc import Callable, Sequence
from typing import TypeVar

_COMPILERS = ("cc", "gcc", "g++", "clang", "clang++")

Used = TypeVar("Used")


class CannotCompile(Exception):
    """Why there is no library, as part of a sentence."""


def use_library(source: str, options: Sequence[str], kept: str, use: Callable[[str], Used]) -> Used:
    """Returns use(path) for the shared library that the C file `source` compiles to.

    options: the compiler's. kept: where the library is kept; it is built if it is not there or if `use`
    raises OSError for it, and built for this process alone where it can't be kept.

    Raises: CannotCompile; and whatever `use` raises for a library that was just built.
    """
    try:
        return use(kept)
    except OSError:  # not built yet, or damaged
        import tempfile
    try:
        os.makedirs(os.path.dirname(kept), exist_ok=True)
        workshop = tempfile.TemporaryDirectory(dir=os.path.dirname(kept))
    except OSError:
        workshop, kept = tempfile.TemporaryDirectory(prefix="mlxft-"), ""
    with workshop as folder:  # readable by this user only
        built = os.path.join(folder, os.path.basename(kept) or "library.so")
        _compile(source, options, built)
        if kept:
            os.replace(built, kept)  # whole or not at all: another process may be loading or building it
        return use(kept or built)


def _compile(source: str, options: Sequence[str], output: str) -> None:
    import shutil
    import subprocess

    name = os.path.basename(source)
    compilers = [path for path in map(shutil.which, _COMPILERS) if path]
    if not compilers:
        raise CannotCompile(f"{name} needs a C compiler once, and PATH has none of {', '.join(_COMPILERS)}")
    for compiler in compilers:
        command = [compiler, "-shared", "-fPIC", *options, "-o", output, source]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        if done.returncode == 0:
            with open(output, "rb") as file:
                os.fsync(file)  # a file cut short by a power cut would kill the process that loads it
            return
    complaint = (done.stderr.strip() or f"exit {done.returncode}").splitlines()[0]
    raise CannotCompile(f"{compilers[-1]} could not compile {name} ({complaint})")


def cache_folder(name: str) -> str:
    """Returns the folder where libraries of that name are kept."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return os.path.join(base, "mlxft", name)
