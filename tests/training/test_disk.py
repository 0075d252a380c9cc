"""Writes that fail: what is said of them."""

import errno
import os

import mlx.core as mx
import pytest

from mlxft.errors import GuardStop
from mlxft.training.checkpoint import CheckpointStore
from mlxft.training.disk import disk_guard, write_arrays, write_whole
from tests.permissions import as_nobody_in_a_folder

PERMISSION, SPACE = "give this user the permission to write there", "free some space"


@pytest.mark.parametrize(
    "number, remedy",
    [
        (errno.EACCES, PERMISSION),
        (errno.EPERM, PERMISSION),
        (errno.EROFS, PERMISSION),
        (errno.ENOSPC, SPACE),
        (errno.EDQUOT, SPACE),
        (errno.EFBIG, SPACE),
        (errno.EIO, "put that right"),
    ],
)
def test_the_remedy_is_that_of_the_fault(number, remedy):
    with pytest.raises(GuardStop) as stop, disk_guard("run/metrics.jsonl"):
        raise OSError(number, os.strerror(number))
    assert str(stop.value) == (
        f"run/metrics.jsonl could not be written: {os.strerror(number)}. Earlier checkpoints are intact; "
        f"{remedy}, then continue with trainer.resume=auto"
    )


def test_a_folder_that_may_not_be_written_is_a_matter_of_permission_and_keeps_what_it_has():
    def adapter(folder):
        write_arrays(folder / "adapters.safetensors", {"w": mx.ones(4)})

    with as_nobody_in_a_folder() as place:
        store = CheckpointStore(place)
        store.save({"step": 1}, None, adapter)
        (place / "summary.json").write_text("old")
        for folder in (place / "checkpoints", place):
            os.chmod(folder, 0o555)
        with pytest.raises(GuardStop, match=f"step 2 in .*: Permission denied.*{PERMISSION}"):
            store.save({"step": 2}, None, adapter)
        with pytest.raises(GuardStop, match=f"summary.json could not be written: Permission.*{PERMISSION}"):
            write_whole(place / "summary.json", "new")
        assert store.latest().step == 1 and (place / "summary.json").read_text() == "old"
        for folder in (place, place / "checkpoints"):
            os.chmod(folder, 0o755)
