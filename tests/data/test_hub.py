"""Data sets on the hub, by a server that stands in for it, and from the cache when there is none."""

import json
import socket
import subprocess
import sys

import pytest

from tests.command import environment
from tests.hub import COMMIT, stand_in

TRAIN = [
    {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]},
    {"messages": [{"role": "user", "content": "c", "name": "x"}], "n": 1},
]
CODE = """
import json, logging, sys, time
logging.basicConfig(level="WARNING", format="%(message)s")
logging.getLogger("mlxft").setLevel("INFO")
from mlxft.config.schema import DataConfig
from mlxft.data.sources import sets_of
from mlxft.errors import InputError
def found(asked):
    path, validates = asked.pop("path", "owner/name"), asked.pop("validates", False)
    streaming = asked.pop("streaming", False)
    try:
        [rows] = sets_of(path, DataConfig(**asked), validates)
        [part] = rows.parts(streaming)
        return [[f"{part.name}{part.unit}{number}", row] for number, row in part.rows()]
    except InputError as error:
        return str(error)
began = time.monotonic()
every = [found(asked) for asked in json.loads(sys.argv[1])]
print(json.dumps([every, time.monotonic() - began]))
"""


@pytest.fixture
def data_set(tmp_path):
    """A folder as a repository of the hub has it, two configurations in it."""
    folder = tmp_path / "repository"
    files = {"a/train.jsonl": TRAIN, "a/validation.jsonl": TRAIN[:1], "b/test.jsonl": TRAIN[1:]}
    for name, rows in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    head = {"configs": [{"config_name": name, "data_dir": name} for name in "ab"]}
    head["configs"][0]["default"] = True
    (folder / "README.md").write_text(f"---\n{json.dumps(head)}\n---\n")
    return folder


@pytest.fixture
def closed():
    """An address where nothing listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{probe.getsockname()[1]}"


@pytest.fixture
def read(tmp_path):
    """Returns a function (address, keys of each question) -> (rows or an error for each, log, seconds)."""

    def read(address, *asked):
        variables = {name: "" for name in environment() if name.lower().endswith("_proxy")}
        variables |= {"HF_ENDPOINT": address, "HF_HOME": str(tmp_path / "hf"), "HF_HUB_DISABLE_XET": "1"}
        command = [sys.executable, "-c", CODE, json.dumps(asked)]
        done = subprocess.run(
            command, env=environment(**variables), capture_output=True, text=True, check=True, timeout=120
        )
        found, seconds = json.loads(done.stdout)
        return found, done.stderr, seconds

    return read


def test_splits_and_configurations_are_read_row_by_row_and_nulls_left_out(read, data_set):
    with stand_in(data_set, "datasets") as (address, _):
        train, valid, other, part, streamed, no_split, no_subset = read(
            address,
            {},
            {"validates": True},
            {"subset": "b", "split": "test"},
            {"split": "train[1:]"},
            {"streaming": True},
            {"split": "dev"},
            {"subset": "c"},
        )[0]
    assert train == streamed == [[f"owner/name train row {n + 1}", row] for n, row in enumerate(TRAIN)]
    assert valid == [["owner/name validation row 1", TRAIN[0]]]
    assert other == [["owner/name test row 1", TRAIN[1]]]
    assert part == [["owner/name train[1:] row 1", TRAIN[1]]]
    assert "it has no split dev, but train, validation. Say which" in no_split
    assert "'c' not found" in no_subset


def test_the_copy_in_the_cache_is_used_when_the_hub_is_gone(read, data_set, closed):
    with stand_in(data_set, "datasets") as (address, _):
        [found, fixed, changed, other] = read(
            address, {}, {"revision": COMMIT}, {"revision": "v9"}, {"path": "owner/other"}
        )[0]
    assert found == fixed
    kept = f"revision 'v9' cannot be had from the hub, and the cache of data sets has {COMMIT}"
    assert kept in changed  # and is not taken for it
    assert "the hub has no data set owner/other, or not for you" in other
    again, said, seconds = read(closed, {}, {"streaming": True}, {"revision": COMMIT})
    assert again == [found] * 3 and seconds < 20
    assert f"the hub ({closed}) cannot be reached" in said and "a copy in the cache" in said


def test_what_cannot_be_had_is_told_within_seconds(read, closed):
    [error], _, seconds = read(closed, {})
    assert error.startswith("owner/name: there is no such file or folder, and no data set of that name")
    assert f"the hub ({closed}) cannot be reached" in error and "the cache of data sets has no copy" in error
    assert seconds < 20
