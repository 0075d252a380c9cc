"""A checkpoint is whole or not there: killed writers, full disks, damaged files."""

import json
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import mlx.core as mx
import pytest

from mlxft.errors import GuardStop, InputError
from mlxft.training.checkpoint import CheckpointStore, read

# Saves step 1, then step 2 while the process kills itself at the nth call that changes the disk.
SAVER = textwrap.dedent("""
    import os, signal, sys
    from pathlib import Path
    import mlxft, mlx.core as mx
    from mlxft.training.checkpoint import CheckpointStore, write_arrays

    run_dir, kill_at, keep = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])

    def save(step):
        def adapter(folder):
            write_arrays(folder / "adapters.safetensors", {"w": mx.full(1000, step)})
        CheckpointStore(run_dir, keep).save({"step": step}, {"m": mx.full(500, step)}, adapter)

    save(1)
    calls = 0
    def deadly(call):
        def wrapped(*arguments, **more):
            global calls
            calls += 1
            if calls == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)
            return call(*arguments, **more)
        return wrapped
    for name in ("fsync", "rename", "replace", "rmdir", "unlink", "symlink", "mkdir", "open"):
        setattr(os, name, deadly(getattr(os, name)))
    save(2)
    print(calls)
""")


def saver(run_dir, kill_at=0, keep=1):
    return subprocess.run(
        [sys.executable, "-c", SAVER, str(run_dir), str(kill_at), str(keep)], capture_output=True, text=True
    )


def weights(checkpoint) -> list[float]:
    return mx.load(str(checkpoint.folder / "adapters.safetensors"))["w"].tolist()


def test_a_kill_at_any_write_leaves_the_old_or_the_new_checkpoint(tmp_path):
    done = saver(tmp_path / "count")
    assert done.returncode == 0, done.stderr
    calls = int(done.stdout)
    assert calls >= 10
    seen = set()
    for kill_at in range(1, calls + 1):
        run_dir = tmp_path / f"run{kill_at}"
        assert saver(run_dir, kill_at).returncode == -9
        found = CheckpointStore(run_dir).latest()
        assert weights(found) == [found.step] * 1000
        assert read(run_dir / "checkpoints" / "last").step in (1, 2)
        seen.add(found.step)
        # What the killed writer left does not hinder the next one, and goes.
        write_plain(run_dir, 3)
        assert CheckpointStore(run_dir).latest().step == 3
        assert not [path for path in (run_dir / "checkpoints").iterdir() if path.name.startswith(".")]
    assert seen == {1, 2}


def write_plain(run_dir: Path, step: int, keep=2):
    from mlxft.training.checkpoint import write_arrays

    return CheckpointStore(run_dir, keep).save(
        {"step": step},
        {"m": mx.zeros(100_000)},
        lambda folder: write_arrays(folder / "adapters.safetensors", {"w": mx.full(1000, step)}),
    )


def test_a_disk_that_takes_no_more_ends_in_a_sentence_and_keeps_what_was_there(tmp_path):
    """A limit on file size stands for the full disk: the optimiser's 400 kB do not fit."""
    program = textwrap.dedent("""
        import resource, sys
        from pathlib import Path
        from tests.faults.test_checkpoint_faults import write_plain
        from mlxft.errors import GuardStop
        write_plain(Path(sys.argv[1]), 1)
        resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))
        try:
            write_plain(Path(sys.argv[1]), 2)
        except GuardStop as error:
            print(error)
            sys.exit(error.exit_code)
    """)
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True)
    assert done.returncode == 3, done.stderr
    assert "could not be written" in done.stdout and "Earlier checkpoints are intact" in done.stdout
    assert [path.name for path in (tmp_path / "checkpoints").iterdir() if path.name != "last"] == [
        "step-000001"
    ]
    assert CheckpointStore(tmp_path).latest().step == 1


@pytest.mark.parametrize(
    "damage, message",
    [
        (lambda path: path.write_bytes(path.read_bytes()[:-7]), "bytes, .* were written"),
        (lambda path: path.write_bytes(path.read_bytes()[:-1] + b"?"), "SHA-256 differs"),
        (lambda path: path.unlink(), "is missing"),
    ],
)
@pytest.mark.parametrize("name", ["adapters.safetensors", "optimizer.safetensors", "state.json"])
def test_a_damaged_checkpoint_is_named_and_passed_over(name, damage, message, tmp_path, caplog):
    for step in (1, 2):
        write_plain(tmp_path, step)
    damage(tmp_path / "checkpoints" / "step-000002" / name)
    with pytest.raises(InputError, match=message):
        read(tmp_path / "checkpoints" / "step-000002")
    assert CheckpointStore(tmp_path).latest().step == 1
    assert "passing over a damaged checkpoint" in caplog.text and name in caplog.text


def test_only_damaged_checkpoints_are_an_error(tmp_path):
    for step in (1, 2):
        (write_plain(tmp_path, step) / "manifest.json").unlink()
    with pytest.raises(InputError, match="all checkpoints in .* are damaged"):
        CheckpointStore(tmp_path).latest()


def test_the_newest_checkpoints_are_kept_and_last_points_to_the_newest(tmp_path):
    for step in (1, 2, 3, 12):
        write_plain(tmp_path, step, keep=2)
    names = sorted(path.name for path in CheckpointStore(tmp_path).folders())
    assert names == ["step-000003", "step-000012"]
    assert (tmp_path / "checkpoints" / "last").resolve().name == "step-000012"


def test_all_checkpoints_are_kept_on_request(tmp_path):
    for step in range(1, 5):
        write_plain(tmp_path, step, keep="all")
    assert len(CheckpointStore(tmp_path).folders()) == 4


def test_the_manifest_lists_every_file_with_its_size(tmp_path):
    folder = write_plain(tmp_path, 1)
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest.keys() == {path.name for path in folder.iterdir()} - {"manifest.json"}
    assert all(entry["bytes"] == (folder / name).stat().st_size for name, entry in manifest.items())


def test_a_step_saved_again_replaces_the_damaged_one(tmp_path):
    folder = write_plain(tmp_path, 5)
    (folder / "state.json").unlink()
    write_plain(tmp_path, 5)
    assert CheckpointStore(tmp_path).latest().step == 5


def test_an_unwritable_folder_is_a_sentence(tmp_path):
    (tmp_path / "checkpoints").write_text("a file stands where the folder should be")
    with pytest.raises(GuardStop, match="could not be written"):
        write_plain(tmp_path, 1)
    shutil.rmtree(tmp_path)
