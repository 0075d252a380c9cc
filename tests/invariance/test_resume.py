"""A run that was stopped and resumed equals the run that never stopped, bit for bit."""

import os
import shutil
import signal

import mlx.core as mx
import numpy as np
import pytest

from mlxft.errors import Interrupted
from mlxft.segmented.gradients import Gradient
from tests.runs import metrics, train, write_token_rows
from tests.tiny_models import make_model

# 10 rows in batches of 2, windows of 2 micro-batches: three steps an epoch, the third with one.
SETTINGS = [
    "data.batch_size=2",
    "trainer.accumulate=2",
    "trainer.epochs=3",
    "adapter.rank=4",
    "adapter.dropout=0.2",
    "optimizer.lr=1e-2",
    "schedule.warmup_steps=2",
    "trainer.eval_every=2",
    "trainer.save_every=1",
    "trainer.keep=all",
    "trainer.seed=7",
]
STEPS = 9


@pytest.fixture(scope="module")
def setting(tmp_path_factory):
    """The model, the rows, and the run that was never stopped, with a checkpoint of each step."""
    root = tmp_path_factory.mktemp("resume")
    model = make_model(root / "model", "llama", num_hidden_layers=2)
    data = write_token_rows(root / "rows.jsonl", [5, 9, 30, 7, 12, 18, 6, 25, 11, 4])
    valid = write_token_rows(root / "valid.jsonl", [8, 13, 5], seed=1)
    more = [*SETTINGS, f"data.valid={valid}"]
    train(model, data, root / "straight", *more)
    return root, model, data, more


def arrays_of(run_dir, step: int) -> dict[str, np.ndarray]:
    """The weights and the optimiser's state after a step."""
    last = run_dir / "checkpoints" / f"step-{step:06d}"
    return {
        f"{file} {name}": np.array(array)
        for file in ("adapters", "optimizer")
        for name, array in mx.load(str(last / f"{file}.safetensors")).items()
    }


def assert_same_run(one, other, last: int = STEPS):
    assert metrics(one) == metrics(other)
    for name, array in arrays_of(one, last).items():
        assert np.array_equal(array, arrays_of(other, last)[name]), name
    for folder in ("adapter", "best"):
        ours, theirs = ((run / folder / "adapters.safetensors").read_bytes() for run in (one, other))
        assert ours == theirs, folder


@pytest.mark.parametrize("step", range(1, STEPS))
def test_resuming_after_any_step_equals_never_stopping(setting, step, tmp_path):
    root, model, data, more = setting
    stopped = tmp_path / "stopped"
    shutil.copytree(root / "straight", stopped, symlinks=True)
    shutil.rmtree(stopped / "adapter")
    for later in range(step + 1, STEPS + 1):
        shutil.rmtree(stopped / "checkpoints" / f"step-{later:06d}")
    train(model, data, stopped, *more, "trainer.resume=auto")
    assert_same_run(root / "straight", stopped)


@pytest.mark.parametrize("call", [1, 2, 6, 9])
def test_a_signal_anywhere_in_a_window_saves_and_the_window_is_run_again(
    setting, call, tmp_path, monkeypatch
):
    """The signal arrives while micro-batch number `call` is computed: 2 ends a window, 6 is inside one."""
    root, model, data, more = setting
    calls = iter(range(1, 100))
    original = Gradient.__call__

    def interrupted(self, *arguments):
        if next(calls) == call:
            os.kill(os.getpid(), signal.SIGTERM)
        return original(self, *arguments)

    run_dir = tmp_path / "run"
    with monkeypatch.context() as patch:
        patch.setattr(Gradient, "__call__", interrupted)
        with pytest.raises(Interrupted) as stop:
            train(model, data, run_dir, *more)
    assert stop.value.exit_code == 143
    train(model, data, run_dir, *more, "trainer.resume=auto")
    assert_same_run(root / "straight", run_dir)


def test_the_same_run_twice_gives_the_same_bits(setting, tmp_path):
    root, model, data, more = setting
    train(model, data, tmp_path / "again", *more)
    assert_same_run(root / "straight", tmp_path / "again")


def test_validation_does_not_change_training(setting, tmp_path):
    root, model, data, _ = setting
    train(model, data, tmp_path / "unwatched", *(s for s in SETTINGS if "eval_every" not in s))
    assert metrics(tmp_path / "unwatched") == metrics(root / "straight", "train")


EVERYTHING = [
    "adapter.kind=dora",
    "adapter.modules_to_save=[norm,embed_tokens]",
    "adapter.rslora=true",
    "optimizer.lora_plus_ratio=4",
    "optimizer.decay_vectors=false",
    "trainer.neftune_alpha=5",
    "schedule=wsd",
    "schedule.decay_share=0.5",
    "trainer.max_steps=5",
]


@pytest.mark.parametrize("gradient", ["whole", "segmented"])
def test_lengths_whole_modules_groups_and_noise_resume_to_the_bit_too(setting, gradient, tmp_path):
    _, model, data, more = setting
    more = [*more, *EVERYTHING, f"trainer={gradient}"]
    straight, stopped = tmp_path / "straight", tmp_path / "stopped"
    train(model, data, straight, *more)
    shutil.copytree(straight, stopped, symlinks=True)
    shutil.rmtree(stopped / "adapter")
    for later in (3, 4, 5):
        shutil.rmtree(stopped / "checkpoints" / f"step-{later:06d}")
    train(model, data, stopped, *more, "trainer.resume=auto")
    assert_same_run(straight, stopped, last=5)


def test_each_epoch_sees_every_row_once(setting):
    root = setting[0]
    lines = metrics(root / "straight", "train")
    supervised = [sum(line["tokens"] for line in lines[epoch * 3 : epoch * 3 + 3]) for epoch in range(3)]
    # Of n tokens those from the middle on are targets, and the first token never is one.
    expected = sum(n - -(-n // 2) for n in [5, 9, 30, 7, 12, 18, 6, 25, 11, 4])
    assert supervised == [expected] * 3
