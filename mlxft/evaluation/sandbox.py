"""Runs a program that a model wrote: apart from this process, for a time, with little memory and no network.

It keeps mistakes in, an endless loop, a full memory, a deleted file of its own folder; it is no wall against
code that means harm. The program is a process of the same user and can read what the user can. Where the
system lets it (`unshare` of Linux), it has no network, and a process list of its own that ends with it.
"""

import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

_UNSHARE = "unshare --user --map-root-user --net --pid --fork --kill-child --mount-proc".split()
_MEMORY_BYTES = 1 << 30
_FILE_BYTES = 16 << 20
_MOST_FILES, _MOST_PROCESSES = 64, 32
_SHOWN_BYTES = 4_000  # of what the program says, for a message

# The limits are set in the program's own process: a process with threads must not run Python after a fork.
_RUNNER = f"""\
import resource
for name, most in (("CPU", {{seconds}}), ("AS", {_MEMORY_BYTES}), ("FSIZE", {_FILE_BYTES}),
                   ("NOFILE", {_MOST_FILES}), ("NPROC", {_MOST_PROCESSES}), ("CORE", 0)):
    try:
        resource.setrlimit(getattr(resource, "RLIMIT_" + name), (most, most))
    except (ValueError, OSError):
        pass  # a limit that the system has not, or has lower
with open("program.py", encoding="utf-8") as file:
    code = file.read()
exec(compile(code, "program.py", "exec"), {{{{"__name__": "__main__"}}}})
print({{proof!r}})
"""


@dataclass(frozen=True)
class Outcome:
    """passed: the program ran to its end. told: the last of what it said, or why it was stopped."""

    passed: bool
    told: str


@lru_cache(maxsize=1)
def cuts_network() -> bool:
    """Tells whether programs are run without a network here."""
    if shutil.which("unshare") is None:
        return False
    done = subprocess.run([*_UNSHARE, "true"], capture_output=True, stdin=subprocess.DEVNULL)
    return done.returncode == 0


def run(program: str, timeout: float) -> Outcome:
    """Runs Python code in a folder of its own that is deleted after; `timeout` in seconds."""
    proof = secrets.token_hex(16)  # told at the end: a program that ends itself early has not passed
    runner = _RUNNER.format(seconds=int(timeout) + 1, proof=proof)
    with tempfile.TemporaryDirectory(prefix="mlxft-program-", ignore_cleanup_errors=True) as folder:
        (Path(folder) / "run.py").write_text(runner, encoding="utf-8")
        (Path(folder) / "program.py").write_text(program, encoding="utf-8", errors="replace")
        prefix = _UNSHARE if cuts_network() else ()
        with (Path(folder) / "out").open("wb") as out:
            process = subprocess.Popen(
                [*prefix, sys.executable, "-I", "-B", "run.py"],
                cwd=folder,
                env={"PATH": os.defpath, "HOME": folder, "TMPDIR": folder, "LANG": "C.UTF-8"},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            process.wait(timeout)
            stopped = ""
        except subprocess.TimeoutExpired:
            stopped = f"stopped after {timeout:g} seconds"
        finally:
            _end(process)
        told = _last(Path(folder) / "out")
    passed = not stopped and process.returncode == 0 and told.rstrip().endswith(proof)
    return Outcome(passed, stopped or told.replace(proof, "").strip())


def _end(process: subprocess.Popen) -> None:
    """Ends the program and what it started; after `wait` returned, what it left behind."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        pass  # nothing is left
    process.wait()


def _last(file: Path) -> str:
    with file.open("rb") as said:
        said.seek(max(file.stat().st_size - _SHOWN_BYTES, 0))
        return said.read().decode(errors="replace")
