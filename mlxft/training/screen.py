"""The training screen: a live line with progress on a terminal, plain lines anywhere else."""

import sys
import time
from contextlib import contextmanager
from typing import Any

# Without a terminal, steps are printed at most this often, so that logs stay readable.
_SECONDS_BETWEEN_LINES = 5.0


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
        if (
            record["step"] < self._total
            and now - self._last < _SECONDS_BETWEEN_LINES
            and "skipped" not in record
        ):
            return
        self._last = now
        print(
            f"step {record['step']}/{self._total}  {_describe(record)}  {self._pace.left()} left", flush=True
        )

    def valid(self, record: dict[str, Any]) -> None:
        """Prints the validation loss."""
        print(_describe_validation(record), flush=True)


class RichScreen:
    """A progress bar with loss, speed, memory and time left; validations stay above it."""

    def __init__(self, progress, total_steps: int):
        self._progress = progress
        self._task = progress.add_task("train", total=total_steps, status="loading")
        self._pace = _Pace(total_steps)

    def step(self, record: dict[str, Any]) -> None:
        """Moves the bar to the step."""
        self._pace.add(record)
        status = f"{_describe(record)}  {self._pace.left()} left"
        self._progress.update(self._task, completed=record["step"], status=status)

    def valid(self, record: dict[str, Any]) -> None:
        """Prints the validation loss above the bar."""
        self._progress.console.print(_describe_validation(record))


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


def _describe(record: dict[str, Any]) -> str:
    skipped = "  SKIPPED (not finite)" if "skipped" in record else ""
    return (
        f"loss {record['loss']:.4f}  lr {record['lr']:.2e}  {record['tokens_per_s']:,.0f} tokens/s  "
        f"peak {record['peak_bytes'] / 1e9:.2f} GB{skipped}"
    )


def _describe_validation(record: dict[str, Any]) -> str:
    best = "  (best so far)" if record["best"] else ""
    return f"validation at step {record['step']}: loss {record['loss']:.4f}{best}"


@contextmanager
def open_screen(total_steps: int):
    """Gives the screen that fits where the output goes."""
    if not sys.stdout.isatty():
        yield PlainScreen(total_steps)
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    columns = (
        TextColumn("step"),
        MofNCompleteColumn(),
        BarColumn(bar_width=24),
        TextColumn("{task.fields[status]}"),
    )
    with Progress(*columns) as progress:
        yield RichScreen(progress, total_steps)
