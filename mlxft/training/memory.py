"""The memory of a step: its peak, and for `trainer.log_memory=true` what each of its phases costs."""

import re
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Sequence

import mlx.core as mx

from mlxft.errors import GuardStop
from mlxft.training.metrics import MetricsFile
from mlxft.training.objectives.common import Row

# How MLX's allocators, Metal and CUDA say that there is no memory left.
_NO_MEMORY = re.compile(r"out of memory|insufficient memory|unable to allocate|attempting to allocate", re.I)


class StepMemory:
    """The highest number of bytes in use during an optimiser step, as MLX counts them."""

    def begin(self, step: int) -> None:
        """Starts to measure the optimiser step `step` (from 1)."""
        mx.reset_peak_memory()

    def peak_bytes(self) -> int:
        """Returns the peak since the step began."""
        return mx.get_peak_memory()


class MemoryLog(StepMemory):
    """Evaluates the phases of a step one by one and writes a line to memory.jsonl for each.

    phase: forward (what the backward needs is kept), head and backward of each micro-batch, then
    optimiser. `peak_bytes` is the highest since the phase began, `active_bytes` and `cache_bytes` are
    those at its end.
    """

    def __init__(self, path: Path, from_step: int = 0):
        self._file = MetricsFile(path, from_step)
        self._step = from_step
        self._peak = 0

    def begin(self, step: int) -> None:
        """Starts to measure the optimiser step `step` (from 1)."""
        super().begin(step)
        self._step, self._peak = step, 0

    def __call__(self, phase: str, arrays: Any) -> None:
        mx.eval(arrays)  # if they are not yet: a segmented backward has evaluated them on the way
        peak = mx.get_peak_memory()
        self._peak = max(self._peak, peak)
        mx.reset_peak_memory()
        self._file.write(
            {
                "step": self._step,
                "phase": phase,
                "peak_bytes": peak,
                "active_bytes": mx.get_active_memory(),
                "cache_bytes": mx.get_cache_memory(),
            }
        )

    def close(self) -> None:
        """Closes the file."""
        self._file.close()

    def peak_bytes(self) -> int:
        """Returns the peak of the step over all its phases."""
        return max(self._peak, mx.get_peak_memory())


@contextmanager
def memory_guard(what: str, batches: Sequence[Sequence[Row]]):
    """Makes of MLX running out of memory within the block a GuardStop that says what may help.

    what: what needed it, such as "step 3".
    """
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not isinstance(error, MemoryError) and not _NO_MEMORY.search(str(error)):
            raise
        rows, width = max((len(batch), max(row.num_tokens for row in batch)) for batch in batches)
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise GuardStop(
            f"{what} needs more memory than there is, for {rows} rows of up to {width} tokens at once "
            f"({reason}). Checkpoints are intact. Fewer rows at once (data.batch_size, with more "
            "trainer.accumulate), shorter ones (data.max_length) or trainer=segmented need less"
        ) from error
