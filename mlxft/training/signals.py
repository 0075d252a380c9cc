"""Ctrl-C and SIGTERM end a run after it has saved; a second one ends it at once."""

import signal
from contextlib import contextmanager
from typing import Optional

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopRequest:
    """Remembers the first signal that asked to stop; calling it tells whether one did."""

    def __init__(self):
        self.signum: Optional[int] = None

    def __call__(self) -> bool:
        return self.signum is not None

    def _receive(self, signum, frame):
        self.signum = signum
        for each in SIGNALS:
            signal.signal(each, signal.SIG_DFL)


@contextmanager
def stop_on_signals():
    """Gives a `StopRequest` that watches for signals within the block.

    Signals reach only a process's main thread: elsewhere nothing is watched.
    """
    request = StopRequest()
    try:
        before = {signum: signal.signal(signum, request._receive) for signum in SIGNALS}
    except ValueError:  # not the main thread
        yield request
        return
    try:
        yield request
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)
