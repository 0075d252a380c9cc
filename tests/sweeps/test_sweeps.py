"""Whole sweeps: what they leave, what one failure does to the rest, and how they go on after a stop."""

import json
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.command import MLXFT, environment, mlxft
from tests.runs import arrays, metrics, same
from tests.sweeps.conftest import results

RATES = "optimizer.lr=1e-3,1e-2"


def test_the_second_job_is_the_same_run_alone_bit_for_bit(sweep, given, here):
    done = sweep(RATES, "adapter.dropout=0.1", "sweep.dir=s")
    second = here / "s" / "01_lr-0.01"
    alone = mlxft("train", *given, "adapter.dropout=0.1", "optimizer.lr=1e-2", "run.dir=alone")
    assert alone.returncode == 0
    assert metrics(second) == metrics(here / "alone")
    assert same(arrays(second / "adapter"), arrays(here / "alone" / "adapter"))
    values = {name: result["value"] for name, result in results(here / "s").items()}
    assert values == {path.name: metrics(path, "valid")[-1]["loss"] for path in (here / "s").glob("0*")}
    rows = [line.split() for line in done.stdout.splitlines() if line.strip()[:2] in ("00", "01")]
    assert [row[0] for row in rows] == [name[:2] for name in sorted(values, key=values.get)]  # best first


def test_a_job_that_fails_stops_no_other_and_is_tried_again_on_request(sweep, here):
    rows = here / "late.jsonl"
    done = sweep(f"data.valid={rows},null", "sweep.dir=s", code=2)
    assert f"{rows}; paths are taken from" in done.stderr  # what is not there is told before any run begins
    assert not (here / "s").exists()

    rows.write_text("{}\n")  # faulty, which only the run itself finds
    done = sweep(f"data.valid={rows},null", "sweep.dir=s", code=1)
    ended = {name[:2]: result["status"] for name, result in results(here / "s").items()}
    assert ended == {"00": "wrong input", "01": "completed"}
    assert "late.jsonl:1" in done.stdout and "all it printed: s/logs/00_" in done.stdout

    kept = (here / "s" / "01_valid-null" / "summary.json").stat().st_mtime_ns
    sweep("sweep.resume=s", code=1, given=())  # by itself what failed is left
    rows.write_text('{"input_ids": [5, 6, 7], "completion_mask": [0, 1, 1]}\n')
    sweep("sweep.resume=s", "sweep.retry_failed=true", given=())
    assert {result["status"] for result in results(here / "s").values()} == {"completed"}
    assert (here / "s" / "01_valid-null" / "summary.json").stat().st_mtime_ns == kept


LONG = [RATES, "trainer.max_steps=60", "trainer.save_every=2", "trainer.keep=1"]


def started(given, *arguments: str) -> subprocess.Popen:
    words, pipe = [*MLXFT, "train", "-m", *given, *LONG, *arguments], subprocess.PIPE
    return subprocess.Popen(words, env=environment(), stdout=pipe, stderr=pipe, text=True)


def wait_for(folder: Path) -> None:
    until = time.monotonic() + 60
    while not (folder / "checkpoints" / "step-000002").exists():
        assert time.monotonic() < until
        time.sleep(0.02)


@pytest.fixture(scope="module")
def straight(given, tmp_path_factory):
    """The folder of the sweep that is never stopped."""
    folder = tmp_path_factory.mktemp("straight") / "s"
    assert mlxft("train", "-m", *given, *LONG, f"sweep.dir={folder}").returncode == 0
    return folder


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGTERM])
def test_a_sweep_that_was_stopped_goes_on_where_it_was(given, here, signum, straight):
    process = started(given, "sweep.dir=s")
    wait_for(here / "s" / "00_lr-0.001")
    process.send_signal(signum)
    _, said = process.communicate(timeout=60)
    if signum == signal.SIGTERM:
        assert process.returncode == 128 + signum
        assert "sweep.resume=s continues it" in said
        assert results(here / "s")["00_lr-0.001"]["status"] == "interrupted"
    assert not (here / "s" / "01_lr-0.01").exists()
    done = mlxft("train", "-m", "sweep.resume=s")
    assert done.returncode == 0, done.stderr
    assert "00_lr-0.001: goes on" in done.stderr
    for name in ("00_lr-0.001", "01_lr-0.01"):
        assert metrics(here / "s" / name) == metrics(straight / name)
        assert same(arrays(here / "s" / name / "adapter"), arrays(straight / name / "adapter"))


def test_a_search_goes_on_with_its_study(sweep, here):
    pytest.importorskip("optuna")
    varied = ["optimizer.lr=tag(log, interval(1e-4, 1e-1))", "adapter.rank=2,4"]
    settings = ["sweep.search=optuna", "sweep.metric=loss"]
    sweep(*varied, *settings, "sweep.trials=3", "sweep.dir=straight")
    sweep(*varied, *settings, "sweep.trials=1", "sweep.dir=s")
    sweep("sweep.resume=s", "sweep.trials=3", given=())
    found, expected = results(here / "s"), results(here / "straight")
    assert len(found) == 3 and found.keys() == expected.keys()
    assert [each["value"] for each in found.values()] == [each["value"] for each in expected.values()]


def test_what_a_guard_stops_is_the_worst_there_is_for_a_search(sweep, here):
    optuna = pytest.importorskip("optuna")
    sweep(
        "trainer.memory_limit=1e-6,1", "sweep.search=optuna", "sweep.trials=3", "sweep.seed=1", "sweep.dir=s",
        code=1,
    )  # fmt: skip
    journal = optuna.storages.journal.JournalFileBackend(str(here / "s" / "optuna.journal"))
    study = optuna.load_study(study_name="sweep", storage=optuna.storages.JournalStorage(journal))
    values = {trial.params["trainer.memory_limit"]: trial.value for trial in study.trials}
    assert values[1e-6] == float("inf") and values[1] < 10


def test_jobs_run_through_submitit_too(sweep, here):
    pytest.importorskip("submitit")
    sweep(
        RATES, "sweep.launcher=submitit", "sweep.submitit={cluster: local, timeout_min: 5}", "sweep.jobs=2",
        "sweep.dir=s",
    )  # fmt: skip
    assert {result["status"] for result in results(here / "s").values()} == {"completed"}


@pytest.mark.parametrize(
    "arguments, told",
    [
        (["optimizr.lr=1,2"], "optimizr.lr: there is no such key; here it is optimizer.lr"),
        (["optimizer.lr=1e-3,-1"], "optimizer.lr=-1: the configuration has a problem:\n  optimizer.lr: -1.0"),
        (["optimizer.lr=1e-3,0.001"], "optimizer.lr=0.001 and optimizer.lr=0.001 are the same run"),
        (["optimizer.lr=1e-3"], "nothing varies; give a key several values"),
        ([RATES, "run.dir=x"], "run.dir: each job has a folder of its own"),
        ([RATES, "trainer.resume=auto"], "trainer.resume: jobs go on by themselves; sweep.resume"),
        ([RATES, "sweep.job=2"], "sweep.job: there is no such key; did you mean sweep.jobs?"),
        ([RATES, "sweep.goal=least"], "sweep.goal: 'least' is not known; there are min, max"),
        (["+sweep=lr_gird"], "sweep: 'lr_gird' is no file of configs/sweep; did you mean lr_grid?"),
        ([RATES, "sweep.resume=nowhere"], "sweep.resume=nowhere: there is no sweep"),
    ],
)
def test_a_wrong_word_starts_nothing(given, here, capsys, arguments, told):
    from mlxft import cli

    assert cli.main(["train", "-m", *given, *arguments]) == 2
    said = capsys.readouterr().err
    assert told in said and "Traceback" not in said
    assert not list(here.iterdir())


def test_files_of_sweeps_say_what_varies(sweep, here):
    sweep("+sweep=lr_grid", "trainer.max_steps=1", "optimizer.lr=1e-3,1e-2", "sweep.dir=s")  # typed ones win
    begun = json.loads((here / "s" / "sweep.json").read_text())
    assert [job["varied"] for job in begun["jobs"]] == [{"optimizer.lr": "0.001"}, {"optimizer.lr": "0.01"}]


def test_a_sweep_that_is_continued_is_the_one_that_was_begun(sweep, here):
    sweep(RATES, "trainer.max_steps=1", "sweep.dir=s")
    said = sweep("sweep.resume=s", "sweep.metric=accuracy", code=2, given=()).stderr
    assert "sweep.metric: the sweep began with 'loss', and goes on so" in said
    assert "s is the sweep of other arguments" in sweep("sweep.resume=s", "adapter.rank=2,4", code=2).stderr
    said = sweep(RATES, "sweep.dir=s", code=2).stderr
    assert "sweep.dir=s holds a sweep; sweep.resume=s continues it" in said
