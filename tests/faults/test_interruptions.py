"""What comes from outside: kills, signals, full disks, readers that go away."""

import contextlib
import os
import random
import resource
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from mlxft import cli
from mlxft.errors import GuardStop, Interrupted
from mlxft.segmented.gradients import Gradient
from mlxft.training.checkpoint import CheckpointStore
from tests.command import MLXFT, environment
from tests.runs import arrays, metrics, same, train


def settings(model, rows, *more) -> list[str]:
    return [f"model.path={model}", f"data.train={rows}", "data.format=tokens", "adapter.rank=2", *more]


def launch(*overrides, **options) -> subprocess.Popen:
    """Starts the command as a process of its own."""
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | options
    return subprocess.Popen([*MLXFT, "train", *overrides], env=environment(), **options)


def wait_for_step(process: subprocess.Popen, run_dir: Path, step: int) -> None:
    """Returns as soon as metrics.jsonl has that many steps."""
    path = run_dir / "metrics.jsonl"
    until = time.monotonic() + 60
    while not path.exists() or path.read_bytes().count(b'"train"') < step:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < until
        time.sleep(0.005)


# ---- kills and signals ----

ENOUGH = ["trainer.max_steps=24", "trainer.save_every=1", "optimizer.lr=1e-2", "adapter.dropout=0.1"]


def test_kills_at_random_moments_change_nothing_after_a_resume(model, rows, here):
    train(model, rows, here / "straight", "adapter.rank=2", *ENOUGH)
    run_dir = here / "killed"
    moments = random.Random(5)
    resume: list[str] = []
    for _ in range(3):
        process = launch(*settings(model, rows, f"run.dir={run_dir}", *ENOUGH, *resume))
        done = metrics(run_dir)[-1]["step"] if (run_dir / "metrics.jsonl").exists() else 0
        wait_for_step(process, run_dir, done + 1)
        time.sleep(moments.uniform(0, 0.2))
        process.kill()
        process.communicate()
        resume = ["trainer.resume=auto"]
    train(model, rows, run_dir, "adapter.rank=2", *ENOUGH, *resume)
    assert metrics(run_dir) == metrics(here / "straight")
    for name in ("adapter/adapters", "checkpoints/last/optimizer"):
        folder, file = name.rsplit("/", 1)
        assert same(arrays(run_dir / folder, file), arrays(here / "straight" / folder, file)), name


@pytest.mark.parametrize("signum, code", [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_saves_and_another_run_in_the_folder_is_refused(signum, code, model, rows, here, refused):
    run_dir = here / "run"
    overrides = settings(model, rows, f"run.dir={run_dir}", "trainer.max_steps=100000")
    process = launch(*overrides)
    wait_for_step(process, run_dir, 2)
    for resume in ("none", "auto"):
        said = refused(*overrides, f"trainer.resume={resume}")
        assert f"another process trains in {run_dir} now" in said
    process.send_signal(signum)
    out, err = (text.decode() for text in process.communicate(timeout=30))
    assert process.returncode == code
    step = metrics(run_dir)[-1]["step"]
    assert CheckpointStore(run_dir).latest().step == step
    assert f"interrupted: saved step {step} in " in err and "Traceback" not in err
    assert "stopping: " in err and "a second signal ends it at once" in err
    assert "interrupted: saved step" in (run_dir / "train.log").read_text()
    assert not (run_dir / "summary.json").exists()


def receive_in_each_step(signum: int, monkeypatch) -> None:
    """Lets this process get a signal before each backward."""

    def received(self, *arguments):
        os.kill(os.getpid(), signum)
        return original(self, *arguments)

    original = Gradient.__call__
    monkeypatch.setattr(Gradient, "__call__", received)


def test_a_closed_terminal_saves_too_and_a_run_that_goes_on_has_not_ended(model, rows, here, monkeypatch):
    """A run of one step has ended; given more, it is interrupted in the second."""
    train(model, rows, here / "run", "trainer.max_steps=1")
    assert (here / "run" / "summary.json").exists()

    receive_in_each_step(signal.SIGHUP, monkeypatch)
    with pytest.raises(Interrupted, match="saved step 2") as stop:
        train(model, rows, here / "run", "trainer.max_steps=5", "trainer.resume=auto")
    assert stop.value.exit_code == 129
    assert not (here / "run" / "summary.json").exists()


def test_a_second_signal_ends_the_process_while_it_computes():
    """The first signals come while MLX is at work on one evaluation of many seconds."""
    program = textwrap.dedent("""
        import mlxft, mlx.core as mx
        from mlxft.training.signals import stop_on_signals
        with stop_on_signals():
            a = mx.random.normal((1500, 1500))
            mx.eval(a)
            for _ in range(400):
                a = a @ a
            print("computing", flush=True)
            mx.eval(a)
    """)
    process = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment()
    )
    assert process.stdout.readline() == b"computing\n"
    time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.3)
    began = time.monotonic()
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 143 and time.monotonic() - began < 1.0
    assert err.count(b"stopping: ") == err.count(b"ended at once: ") == 1


def test_a_signal_that_is_ignored_stays_ignored(model, rows, here, monkeypatch):
    receive_in_each_step(signal.SIGINT, monkeypatch)
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        assert train(model, rows, here / "run").status == "completed"
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


# ---- disks ----


@contextlib.contextmanager
def largest_file(size: int):
    """No file may grow beyond that many bytes: what a full disk looks like to a writer."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize(
    "size, file",
    [(600, "config.yaml"), (3000, "metrics.jsonl"), (20_000, "the checkpoint of step 30")],
)
def test_a_full_disk_ends_in_a_sentence_whatever_was_being_written(size, file, model, rows, here, capsys):
    with largest_file(size):
        code = cli.main(["train", *settings(model, rows, "run.dir=run", "trainer.max_steps=30")])
    said = capsys.readouterr().err
    assert code == 3 and "Traceback" not in said
    assert f"{file}" in said and "could not be written: File too large" in said
    assert not (here / "run" / "summary.json").exists()
    assert not list((here / "run").glob("**/*.safetensors"))
    if file == "config.yaml":
        assert not (here / "run").exists()  # it never began


def test_a_run_goes_on_after_its_disk_was_full(model, rows, here):
    """The line that was cut short goes; the steps after the checkpoint are taken again."""
    more = ["adapter.rank=2", "trainer.max_steps=12", "trainer.save_every=5"]
    train(model, rows, here / "straight", *more)
    room = (here / "straight" / "config.yaml").stat().st_size + 200
    assert room < (here / "straight" / "metrics.jsonl").stat().st_size
    with largest_file(room), pytest.raises(GuardStop, match=r"metrics.jsonl could not be written"):
        train(model, rows, here / "run", *more, "trainer.save_every=100")
    train(model, rows, here / "run", *more, "trainer.resume=auto")
    assert metrics(here / "run") == metrics(here / "straight")


def test_a_log_that_cannot_be_written_ends_the_log_only(model, rows, here, capsys):
    (here / "run").mkdir()
    (here / "run" / "train.log").write_text("x" * 150_000)
    with largest_file(150_000):
        train(model, rows, here / "run")
    said = capsys.readouterr().err
    assert said.count("train.log could not be written: File too large; the log ends here") == 1
    assert (here / "run" / "summary.json").exists()


# ---- readers that go away ----


def test_a_run_outlives_its_standard_output_and_error(model, rows, here):
    """`mlxft train 2>&1 | head -1`, without a race: nobody reads from the start."""
    reading, writing = os.pipe()
    os.close(reading)
    process = launch(*settings(model, rows, "run.dir=run"), stdout=writing, stderr=writing)
    os.close(writing)
    assert process.wait(60) == 0
    assert (here / "run" / "summary.json").exists()
    said = (here / "run" / "train.log").read_text()
    assert "standard error is closed (Broken pipe): the run goes on without it" in said
    assert "standard output is closed (Broken pipe): the run goes on without it" in said
