"""Rows read as they are needed: the same rows, from any place on, and few of them at a time."""

import json
import subprocess
import sys

import pytest

from mlxft.config.schema import DataConfig
from mlxft.data.load import load_examples, stream_for
from mlxft.errors import InputError
from tests.command import environment


def write(write_rows, number):
    """Rows of which every third has nothing to train on and is dropped."""
    return write_rows(
        [{"input_ids": [5, n % 90, 7], "completion_mask": [0, int(n % 3 > 0), 0]} for n in range(number)]
    )


def stream(path, **settings):
    return stream_for("sft", DataConfig(train=path, streaming=True, **settings), None, 100)


def blocks(made, size):
    """Returns all blocks of an epoch, with where each begins."""
    first, found = 0, []
    while first is not None:
        rows, after = made.block(first, size)
        found.append((first, [row.where for row in rows]))
        first = after
    return found


def test_blocks_hold_every_row_that_is_left_in_order(write_rows):
    path = write(write_rows, 1300)
    rows, _ = load_examples(path, DataConfig(), None, 100)
    found = blocks(stream(path), 100)
    assert [where for _, block in found for where in block] == [row.where for row in rows]
    assert [len(block) for _, block in found] == [100] * 8 + [66]  # 1300 - 434 of them


def test_a_block_is_the_same_when_reading_begins_there(write_rows):
    path = write(write_rows, 1300)
    for first, block in blocks(stream(path), 100):
        rows, _ = stream(path).block(first, 100)
        assert [row.where for row in rows] == block


def test_a_faulty_row_is_told_when_it_is_reached(write_rows):
    path = write_rows([*[{"input_ids": [1, 2]}] * 600, "no row"])
    made = stream(path)
    rows, after = made.block(0, 200)
    assert len(rows) == 200 and after == 200
    with pytest.raises(InputError, match=f"^{path}:601: not JSON"):
        made.block(200, 500)


def test_what_became_of_the_rows_is_counted(write_rows):
    made = stream(write(write_rows, 9))
    assert made.block(0, 50)[1] is None
    assert (made.tally.num_rows, sum(made.tally.dropped.values())) == (9, 3)


def test_a_stream_is_one_set(write_rows):
    paths = [write_rows([{"input_ids": [1, 2]}], name) for name in ("a.jsonl", "b.jsonl")]
    with pytest.raises(InputError, match="a stream is one set of rows"):
        stream([{"path": path} for path in paths])
    assert len(stream(paths).block(0, 9)[0]) == 2


MEASURE = """
import os, resource, sys
from mlxft.config.schema import DataConfig
from mlxft.data.load import load_examples, stream_for
def peak():
    if not os.path.exists("/proc/self/status"):
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # Linux counts into ru_maxrss what the process was forked from.
    [line] = [line for line in open("/proc/self/status") if line.startswith("VmHWM")]
    return int(line.split()[1]) * 1024
path, how = sys.argv[1:]
if how == "streamed":
    made, first = stream_for("sft", DataConfig(train=path, streaming=True), None, 100), 0
    before = None
    while first is not None:
        first = made.block(first, 1000)[1]
        before = before or peak()
else:
    load_examples(path + ".small", DataConfig(cache=True, num_workers=0), None, 100)
    before = peak()
    assert len(load_examples(path, DataConfig(cache=how == "kept", num_workers=0), None, 100)[0]) == 24000
print(peak() - before)
"""


def test_memory_does_not_grow_with_the_rows_of_a_stream_or_of_a_set_that_is_kept(tmp_path):
    """24,000 rows of 400 tokens are 48 MB as tokens and masks, and 31 MB as text."""
    line = json.dumps({"input_ids": [7, 11, 5, 93] * 100}) + "\n"
    path = tmp_path / "rows.jsonl"
    path.write_text(line * 24_000)
    (tmp_path / "rows.jsonl.small").write_text(line * 1000)
    grown = {}
    for how in ("held", "streamed", "kept"):
        command = [sys.executable, "-c", MEASURE, str(path), how]
        variables = environment(XDG_CACHE_HOME=str(tmp_path / "cache"))
        done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        grown[how] = int(done.stdout)
    assert grown["held"] > 40e6
    assert grown["streamed"] < 10e6
    assert grown["kept"] < 30e6
