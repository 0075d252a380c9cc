"""Ctrl-C, SIGTERM and a closed terminal end a run after it has saved; a second signal ends it at once."""

import os
import signal
import threading
from contextlib import contextmanager, suppress
from typing import Optional

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

_STOPPING = b"\nstopping: the batch at work is finished and the run saved; a second signal ends it at once\n"
_ENDED = b"\nended at once: what was done since the last checkpoint is not saved\n"
_SHOW_CURSOR = b"\x1b[?25h"


class StopRequest:
    """Remembers the first signal that asked to stop; calling it tells whether one did."""

    def __init__(self):
        self.signum: Optional[int] = None

    def __call__(self) -> bool:
        return self.signum is not None

    def _receive(self, signum, frame=None):
        self.signum = self.signum or signum

    def _watch(self, pipe: int, watched: dict) -> None:
        """Reads signals' numbers from the pipe until it is closed; the second one ends the process."""
        first = True
        while received := os.read(pipe, 1):
            signum = received[0]
            if signum not in watched:
                continue
            self._receive(signum)
            if not first:
                _tell(1, _SHOW_CURSOR if os.isatty(1) else b"")
                _tell(2, _ENDED)
                os._exit(128 + signum)
            first = False
            _tell(2, _STOPPING)


def _tell(descriptor: int, text: bytes) -> None:
    with suppress(OSError):  # a terminal that has gone; what ends the run must not fail
        os.write(descriptor, text)


@contextmanager
def stop_on_signals():
    """Gives a `StopRequest` that watches for signals within the block.

    Python runs its handlers between two of its own steps only, and MLX may compute for minutes within
    one: a thread hears of signals when they come. Signals that are ignored (nohup, a job in a script's
    background) stay ignored. Only a process's main thread can watch: elsewhere nothing is.
    """
    request = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield request
        return
    before = {signum: signal.getsignal(signum) for signum in SIGNALS}
    before = {signum: handler for signum, handler in before.items() if handler is not signal.SIG_IGN}
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    watcher = threading.Thread(target=request._watch, args=(reading, before), daemon=True)
    watcher.start()
    wakeup = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    for signum in before:
        signal.signal(signum, request._receive)
    try:
        yield request
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler or signal.SIG_DFL)
        signal.set_wakeup_fd(wakeup)
        os.close(writing)
        watcher.join()
        os.close(reading)
