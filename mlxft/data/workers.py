"""Chunks of rows made in several processes, in the order in which they were given out.

Each process is a program of its own, started afresh: a fork of one that uses a GPU is unsafe, and
multiprocessing's other ways to start one run the user's script anew.
"""

import os
import pickle
import signal
import subprocess
import sys
import tempfile
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from queue import SimpleQueue
from typing import Any

from mlxft.data.chunks import RawRow, Tally, Task
from mlxft.data.rows import Block
from mlxft.errors import GuardStop, InputError

_AHEAD = 2  # chunks a process that are under way: one in it, one to follow


def num_cores() -> int:
    """Returns how many cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


class Workers:
    """Processes that make chunks of a task with a tokenizer; they end with the context."""

    def __init__(self, number: int, task: Task, tokenizer: Any):
        self._first = pickle.dumps((task, tokenizer), pickle.HIGHEST_PROTOCOL)
        self._number = number
        self._free: SimpleQueue[_Worker] = SimpleQueue()
        self._all: list[_Worker] = []
        self._threads = ThreadPoolExecutor(number)

    def __enter__(self) -> "Workers":
        for _ in range(self._number):
            worker = _Worker(self._first)
            self._all.append(worker)
            self._free.put(worker)
        return self

    def __exit__(self, *_: Any) -> None:
        for worker in self._all:
            worker.end()
        self._threads.shutdown(cancel_futures=True)

    def made(self, chunks: Iterable[Sequence[RawRow]]) -> Iterator[tuple[Block, Tally]]:
        """Yields what is made of each chunk, in order; few are held at any time.

        Raises: InputError of the first row that is wrong, whichever chunk was ready first.
        """
        waiting: deque[Future] = deque()
        source, fault = iter(chunks), None
        while True:
            while fault is None and len(waiting) < _AHEAD * self._number:
                try:
                    waiting.append(self._threads.submit(self._make, next(source)))
                except StopIteration:
                    break
                except InputError as error:  # of a row after those that are under way
                    fault = error
            if not waiting:
                break
            yield waiting.popleft().result()
        if fault is not None:
            raise fault

    def _make(self, chunk: Sequence[RawRow]) -> tuple[Block, Tally]:
        worker = self._free.get()
        try:
            return worker.make(chunk)
        finally:
            self._free.put(worker)


class _Worker:
    """One process (mlxft/data/worker.py)."""

    def __init__(self, first: bytes):
        self._said = tempfile.TemporaryFile()
        quiet = {"TOKENIZERS_PARALLELISM": "false", "TRANSFORMERS_VERBOSITY": "error"}
        found = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "mlxft.data.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._said,
            env=os.environ | quiet | found,
        )
        self._first: bytes | None = first

    def make(self, chunk: Sequence[RawRow]) -> tuple[Block, Tally]:
        """Returns what the process makes of a chunk. Raises: what it raised, or that it has ended."""
        assert self._process.stdin and self._process.stdout
        try:
            if self._first is not None:
                self._process.stdin.write(self._first)
                self._first = None
            pickle.dump(chunk, self._process.stdin, pickle.HIGHEST_PROTOCOL)
            self._process.stdin.flush()
            result = pickle.load(self._process.stdout)
        except (OSError, EOFError, pickle.UnpicklingError) as error:
            raise self._end_told() from error
        if isinstance(result, Exception):
            raise result
        return result

    def end(self) -> None:
        """Ends the process, whatever it is doing."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            try:
                pipe.close()
            except OSError:  # what it was still to be told goes nowhere
                continue
        self._said.close()

    def _end_told(self) -> Exception:
        code = self._process.wait()
        if code == -signal.SIGKILL:
            return GuardStop(
                "stopped: a process that tokenised rows was killed, as systems do that run out of memory. "
                "Lower data.num_workers; 0 tokenises without processes of its own"
            )
        self._said.seek(0)
        said = self._said.read().decode(errors="replace").strip()
        return RuntimeError(f"a process that tokenised rows ended (exit code {code}): {said}")
