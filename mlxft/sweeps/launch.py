"""Where jobs run: as processes of this machine, or through submitit on a cluster."""

import ctypes
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any, Optional, Protocol

from mlxft.errors import InputError

_PR_SET_PDEATHSIG = 1


class Running(Protocol):
    """A job at work."""

    def exit_code(self) -> Optional[int]:
        """Returns how it ended, None while it runs; below 0: minus the signal that killed it."""

    def stop(self, signum: int) -> None:
        """Sends it a signal: SIGTERM lets it save and end, SIGKILL ends it at once."""


class Launcher(Protocol):
    """Starts jobs."""

    def start(self, arguments: list[str], log: Path) -> Running:
        """Starts `mlxft train` with the arguments; what it prints is added to the log."""


class LocalLauncher:
    """Processes of this machine. at_once: how many run together, which share its cores."""

    def __init__(self, at_once: int):
        self._environment = dict(os.environ)
        if at_once > 1:  # each would start a thread a core, and wait for threads that have none
            threads = max((os.cpu_count() or 1) // at_once, 1)
            self._environment.setdefault("OPENBLAS_NUM_THREADS", str(threads))

    def start(self, arguments: list[str], log: Path) -> Running:
        """Starts a process in a session of its own: a terminal's Ctrl-C reaches the sweep only."""
        with open(log, "ab") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", "mlxft", "train", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=self._environment,
                start_new_session=True,
                preexec_fn=_end_with_parent if sys.platform == "linux" else None,
            )
        return _Process(process)


def _end_with_parent() -> None:
    """Asks Linux to send SIGTERM, after which a run saves and ends, when the sweep is killed."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


class _Process:
    def __init__(self, process: subprocess.Popen):
        self._process = process

    def exit_code(self) -> Optional[int]:
        return self._process.poll()

    def stop(self, signum: int) -> None:
        self._process.send_signal(signum)


class SubmititLauncher:
    """Jobs of a cluster: each is a submitit job that runs the command. settings: of submitit's executor."""

    def __init__(self, folder: Path, settings: dict[str, Any]):
        try:
            import submitit
        except ImportError:
            raise InputError("sweep.launcher=submitit: submitit is missing; install mlxft[sweep]") from None
        settings = dict(settings)
        try:
            self._executor = submitit.AutoExecutor(folder, cluster=settings.pop("cluster", None))
            self._executor.update_parameters(**settings)
        except (NameError, TypeError, ValueError, RuntimeError) as error:
            raise InputError(f"sweep.submitit: {error}") from None

    def start(self, arguments: list[str], log: Path) -> Running:
        """Submits a job; it waits for its turn on the cluster."""
        command = [sys.executable, "-m", "mlxft", "train", *arguments]
        return _Submitted(self._executor.submit(run_command, command, str(log), os.getcwd()))


def run_command(command: list[str], log: str, folder: str) -> int:
    """Runs a command in a folder with its output added to a log; returns its exit code. A cluster's job."""
    with open(log, "ab") as output:
        return subprocess.call(command, cwd=folder, stdout=output, stderr=subprocess.STDOUT)


class _Submitted:
    def __init__(self, job: Any):
        self._job = job

    def exit_code(self) -> Optional[int]:
        if not self._job.done():
            return None
        try:
            return self._job.result()
        except Exception:  # submitit's own kinds: the job was lost, cancelled or killed
            return -signal.SIGKILL

    def stop(self, signum: int) -> None:
        self._job.cancel(check=False)
