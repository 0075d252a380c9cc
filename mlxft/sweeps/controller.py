"""Runs a sweep's jobs, so many at once, writes down how each ended, and passes a stop on to them."""

import logging
import signal
import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Optional

from mlxft.errors import Interrupted
from mlxft.sweeps.grid import Job
from mlxft.sweeps.launch import Launcher, Running
from mlxft.sweeps.search import Search
from mlxft.sweeps.store import Result, Store
from mlxft.training.hold import is_taken
from mlxft.training.signals import SIGNALS

log = logging.getLogger("mlxft")

_PAUSE = 0.2  # seconds between two looks at the jobs
_WAITED = 60  # seconds for a run that a killed sweep has left to save and end


@dataclass
class _Started:
    job: Job
    running: Running
    began: float


class Controller:
    """Takes a sweep to its end. settings: the group `sweep`."""

    def __init__(self, store: Store, search: Search, launcher: Launcher, settings: Any):
        self.store, self.search, self.launcher, self.settings = store, search, launcher, settings
        self._at_work: list[_Started] = []
        self._signal: Optional[int] = None

    def run(self) -> None:
        """Runs every job; one that fails does not stop the others.

        Raises: Interrupted after a signal, when the jobs at work have saved and ended.
        """
        with self._stopped_by_signals():
            while self._fill() or self._at_work:
                time.sleep(_PAUSE)
                self._collect()
        if self._signal is not None:
            raise Interrupted(
                f"interrupted; the runs at work have saved. sweep.resume={self.store.folder} continues it",
                self._signal,
            )

    def _fill(self) -> bool:
        """Starts as many jobs as there is room for; tells whether there was one to start."""
        started = False
        while self._signal is None and len(self._at_work) < self.settings.jobs:
            job = self.search.next()
            if job is None:
                break
            self._start(job)
            started = True
        return started

    def _start(self, job: Job) -> None:
        run_dir = self.store.run_dir(job)
        until = time.monotonic() + _WAITED
        while is_taken(run_dir) and time.monotonic() < until and self._signal is None:
            time.sleep(_PAUSE)
        log.info("%s: %s", job.name, "goes on" if run_dir.exists() else "begins")
        group = f"logger.group={self.store.folder.name}"  # unless the sweep itself gives one
        arguments = [group, *job.arguments, f"run.dir={run_dir}", "trainer.resume=auto"]
        running = self.launcher.start(arguments, self.store.log(job))
        self._at_work.append(_Started(job, running, time.monotonic()))

    def _collect(self) -> None:
        for started in list(self._at_work):
            code = started.running.exit_code()
            if code is None:
                continue
            self._at_work.remove(started)
            if self._signal is not None and code < 0:
                code = 128 - code  # it was stopped, before it could save perhaps: it goes on from what it has
            seconds = time.monotonic() - started.began
            settings = self.settings
            result = self.store.record(started.job, code, seconds, settings.metric, settings.goal)
            self.search.tell(started.job, result)
            log.info("%s: %s", started.job.name, _told(result, settings.metric))

    @contextmanager
    def _stopped_by_signals(self):
        """A first signal asks the jobs to save and end, a second one kills them."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return

        def receive(signum: int, frame: Any) -> None:
            first, self._signal = self._signal is None, self._signal or signum
            for started in list(self._at_work):
                started.running.stop(signal.SIGTERM if first else signal.SIGKILL)

        before = {signum: signal.getsignal(signum) for signum in SIGNALS}
        for signum, handler in before.items():
            if handler is not signal.SIG_IGN:
                signal.signal(signum, receive)
        try:
            yield
        finally:
            for signum, handler in before.items():
                signal.signal(signum, handler or signal.SIG_DFL)


def _told(result: Result, metric: str) -> str:
    value = f", {metric} {result.value:.4g}" if result.value is not None else ""
    return f"{result.status}{value}, {result.steps} steps, {result.seconds:.0f} s"
