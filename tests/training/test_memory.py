"""Running out of memory, told apart from other errors, and what a step's peak is made of."""

import json

import mlx.core as mx
import numpy as np
import pytest

from mlxft.data.example import Example
from mlxft.errors import GuardStop
from mlxft.training.memory import MemoryLog, StepMemory, memory_guard

MEGABYTE = 1 << 20


def batch(*lengths):
    return [Example(np.zeros(length, np.int32), np.ones(length, bool), "rows.jsonl:1") for length in lengths]


@pytest.mark.parametrize(
    "text",
    [
        "cudaMallocAsync(&data, size, stream) failed: out of memory",
        "[metal::malloc] Attempting to allocate 48736917632 bytes which is greater than the maximum",
        "[METAL] Command buffer execution failed: Insufficient Memory (00000008)",
        "[malloc] Unable to allocate 137438953472 bytes.\nand more",
    ],
)
def test_no_memory_ends_in_a_sentence_with_the_largest_batch_and_what_helps(text):
    with pytest.raises(GuardStop) as stop:
        with memory_guard("step 7", [batch(5, 9), batch(30, 7, 4)]):
            raise RuntimeError(text)
    said = str(stop.value)
    assert "step 7 needs more memory than there is, for 3 rows of up to 30 tokens at once" in said
    assert text.partition("\n")[0] in said and "and more" not in said
    assert "data.batch_size" in said and "trainer=segmented" in said


def test_other_errors_pass_through():
    with pytest.raises(RuntimeError, match="shapes do not fit"):
        with memory_guard("step 7", [batch(5)]):
            raise RuntimeError("shapes do not fit")


@pytest.mark.parametrize("measured", [StepMemory(), None])
def test_a_steps_peak_is_the_highest_of_its_phases_and_begins_anew(measured, tmp_path):
    """A phase of 8 MB, one of 1 MB, in the next step another of 1 MB."""
    memory = measured or MemoryLog(tmp_path / "memory.jsonl")
    phase = memory if isinstance(memory, MemoryLog) else lambda name, array: mx.eval(array)
    before = mx.get_active_memory()
    memory.begin(1)
    phase("backward", mx.zeros(8 * MEGABYTE, mx.uint8) + 1)
    phase("optimiser", mx.zeros(MEGABYTE, mx.uint8) + 1)
    assert memory.peak_bytes() - before >= 8 * MEGABYTE
    memory.begin(2)
    phase("backward", mx.zeros(MEGABYTE, mx.uint8) + 1)
    assert MEGABYTE <= memory.peak_bytes() - before < 8 * MEGABYTE
    if measured is None:
        lines = [json.loads(line) for line in (tmp_path / "memory.jsonl").read_text().splitlines()]
        assert [(line["step"], line["phase"]) for line in lines] == [
            (1, "backward"),
            (1, "optimiser"),
            (2, "backward"),
        ]
        peaks = [line["peak_bytes"] - before for line in lines]
        assert peaks[0] >= 8 * MEGABYTE > peaks[1] and peaks[0] > peaks[2]
