"""The training screen: a live line with progress on a terminal, plain lines anywhere else.

Whoever watches may go: a pipe that is closed (`| head`), a terminal that is shut. The run goes on.
"""

import logging
import os
import sys
import time
from collections.abc import Callable
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from typing import Any, Optional, TextIO

from mlxft.sizes import written

log = logging.getLogger("mlxft")

# Without a terminal, steps are printed at most this often, so that logs stay readable.
_SECONDS_BETWEEN_LINES = 5.0


class LastingStream:
    """A standard stream to which writing never fails.

    Characters that its encoding does not have become question marks. Once its reader has gone it is
    silent, for the whole process.
    """

    def __init__(self, stream: Optional[TextIO], name: str):
        self._stream = stream  # None where the process was started without one
        self._name = name
        self.encoding = getattr(stream, "encoding", None) or "utf-8"

    def write(self, text: str) -> int:
        """Writes the text, or drops it."""
        known = text.encode(self.encoding, "replace").decode(self.encoding)
        self._attempt(lambda stream: stream.write(known))
        return len(text)

    def flush(self) -> None:
        """Hands on what was written."""
        self._attempt(lambda stream: stream.flush())

    def isatty(self) -> bool:
        """Tells whether a person may watch."""
        return self._stream is not None and self._stream.isatty()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def _attempt(self, action: Callable[[TextIO], Any]) -> None:
        if self._stream is None:
            return
        try:
            action(self._stream)
        except OSError as error:
            # What still waits in the stream's buffer would fail again at the interpreter's end.
            with open(os.devnull, "wb") as nowhere:
                os.dup2(nowhere.fileno(), self._stream.fileno())
            self._stream = None
            log.warning("%s is closed (%s): the run goes on without it", self._name, error.strerror)


@contextmanager
def lasting_output():
    """Makes standard output and standard error, within the block, streams to which writing never fails."""
    output = LastingStream(sys.stdout, "standard output")
    errors = LastingStream(sys.stderr, "standard error")
    with redirect_stdout(output), redirect_stderr(errors):  # type: ignore[type-var]
        yield


class PlainScreen:
    """Prints a line for the first and the last step, every validation, and one every few seconds."""

    def __init__(self, total_steps: int):
        self._total = total_steps
        self._last = -_SECONDS_BETWEEN_LINES
        self._pace = _Pace(total_steps)

    def step(self, record: dict[str, Any]) -> None:
        """Prints the step unless one was printed just now."""
        self._pace.add(record)
        now = time.monotonic()
        if record["step"] < self._total and now - self._last < _SECONDS_BETWEEN_LINES:
            return
        self._last = now
        print(f"step {record['step']}/{self._total}  {_describe(record, self._pace.left())}", flush=True)

    def valid(self, record: dict[str, Any]) -> None:
        """Prints the validation loss."""
        print(_describe_validation(record), flush=True)


class RichScreen:
    """A progress bar with loss, speed, memory and time left; validations stay above it."""

    def __init__(self, progress, first_step: int, total_steps: int):
        self._progress = progress
        self._task = progress.add_task("train", total=total_steps, completed=first_step, status="first step")
        self._pace = _Pace(total_steps)

    def step(self, record: dict[str, Any]) -> None:
        """Moves the bar to the step."""
        self._pace.add(record)
        self._progress.update(
            self._task, completed=record["step"], status=_describe(record, self._pace.left())
        )

    def valid(self, record: dict[str, Any]) -> None:
        """Prints the validation loss above the bar."""
        self._progress.console.print(_describe_validation(record), markup=False, highlight=False)


class _Pace:
    """Time left, from the mean of the steps since the start of this process."""

    def __init__(self, total_steps: int):
        self._total = total_steps
        self._seconds = 0.0
        self._steps = 0
        self._remaining = total_steps

    def add(self, record: dict[str, Any]) -> None:
        self._seconds += record["seconds"]
        self._steps += 1
        self._remaining = self._total - record["step"]

    def left(self) -> str:
        seconds = round(self._remaining * self._seconds / max(self._steps, 1))
        minutes, seconds = divmod(seconds, 60)
        hours, minutes = divmod(minutes, 60)
        return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"


def _describe(record: dict[str, Any], left: str) -> str:
    """Returns a step in words, what matters least last: a narrow terminal cuts it off."""
    skipped = "SKIPPED (not finite)  " if "skipped" in record else ""
    return (
        f"{skipped}loss {record['loss']:.4f}  {_speed(record)}  "
        f"peak {written(record['peak_bytes'])}  {left} left  lr {record['lr']:.2e}"
    )


def _speed(record: dict[str, Any]) -> str:
    """Returns tokens trained on a second, and positions where a long row has few such tokens."""
    tokens, positions = record["tokens_per_s"], record["positions"] / record["seconds"]
    speed = f"{tokens:,.0f} tokens/s" if tokens >= 10 else f"{tokens:.1f} tokens/s"
    return speed if positions < 10 * tokens else f"{speed} of {positions:,.0f} positions/s"


def _describe_validation(record: dict[str, Any]) -> str:
    best = "  (best so far)" if record["best"] else ""
    return f"validation at step {record['step']}: loss {record['loss']:.4f}{best}"


@contextmanager
def open_screen(first_step: int, total_steps: int):
    """Gives the screen that fits where the output goes."""
    if not sys.stdout.isatty() or os.environ.get("TERM") == "dumb":
        yield PlainScreen(total_steps)
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn

    columns = (
        BarColumn(bar_width=24),  # gives way first where the terminal is narrow, then the end of the text
        TextColumn("step {task.completed}/{task.total}  {task.fields[status]}", markup=False),
    )
    with Progress(*columns, console=Console(file=sys.stdout)) as progress:
        yield RichScreen(progress, first_step, total_steps)
