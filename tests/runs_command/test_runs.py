"""`mlxft runs` on real runs: what is listed, how they differ, and what may be deleted."""

import fcntl
import json
import os
import shutil
from pathlib import Path

import pytest

from mlxft import cli
from tests.runs import train, write_token_rows
from tests.tiny_models import make_model


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A folder with runs of two learning rates, and one from the adapter of the first."""
    folder = tmp_path_factory.mktemp("made")
    model = make_model(folder / "model", "llama", num_hidden_layers=1)
    data = write_token_rows(folder / "rows.jsonl", [5, 9, 7])
    for name, rate, steps in (("a", "1e-3", 2), ("b", "1e-2", 3)):
        more = [f"optimizer.lr={rate}", f"trainer.max_steps={steps}"]
        train(model, data, folder / "runs" / "sft" / name, *more)
    first = f"adapter.init_from={folder / 'runs' / 'sft' / 'a' / 'adapter'}"
    train(model, data, folder / "runs" / "sft" / "c", first, "trainer.max_steps=1")
    return folder


@pytest.fixture
def runs(made, here, capsys, monkeypatch):
    """Returns a function (words) -> what `mlxft runs` prints, in a copy of the folder."""
    shutil.copytree(made / "runs", here / "runs")
    for path in sorted((here / "runs").rglob("config.yaml")):
        began = path.stat().st_mtime_ns
        path.write_text(path.read_text().replace(str(made), str(here)))
        os.utime(path, ns=(began, began))
    monkeypatch.setenv("COLUMNS", "200")

    def run(*words: str, code: int = 0) -> str:
        assert cli.main(["runs", *words]) == code
        captured = capsys.readouterr()
        return captured.out if code == 0 else captured.err

    return run


def listed(text: str) -> list[str]:
    return [each["run"] for each in json.loads(text)]


def test_runs_are_listed_with_what_came_of_them(runs, here):
    (first, *_) = json.loads(runs("--json"))
    summary = json.loads((here / "runs" / "sft" / "a" / "summary.json").read_text())
    assert (first["run"], first["status"], first["steps"]) == ("runs/sft/a", "completed", 2)
    assert first["loss"] == summary["loss"] and first["optimizer.lr"] == 1e-3
    line = next(line for line in runs().splitlines() if line.rstrip().endswith("runs/sft/a"))
    assert line.split()[:3] == ["completed", "2", f"{summary['loss']:.4g}"]


@pytest.mark.parametrize(
    "words, names",
    [
        (["sort=steps"], "cab"),
        (["sort=-steps"], "bac"),
        (["optimizer.lr<=1e-3", "sort=-steps"], "ac"),
        (["optimizer.lr=1e-2"], "b"),
        (["status!=completed"], ""),
        (["runs/sft/b", "runs/sft/a", "sort=optimizer.lr"], "ab"),
        (["adapter.init_from!=null", "steps<2"], "c"),
    ],
)
def test_they_are_sorted_and_chosen_by_results_and_keys(runs, words, names):
    assert listed(runs("--json", *words)) == [f"runs/sft/{name}" for name in names]


def test_comparing_shows_what_differs_and_nothing_else(runs):
    found = json.loads(runs("compare", "--json", "runs/sft/a", "runs/sft/b"))
    keys = [key for key in found if "." in key]
    assert keys == ["trainer.max_steps", "optimizer.lr"]
    assert found["optimizer.lr"] == [1e-3, 1e-2] and found["steps"] == [2, 3]
    assert "optimizer.lr" in runs("compare", "runs/sft/a", "runs/sft/b")


@pytest.mark.parametrize(
    "words, said",
    [
        (["sort=los"], "los: there is no such key; did you mean loss?"),
        (["optimiser.lr=1"], "optimiser.lr: there is no such key; did you mean optimizer.lr?"),
        (["nowhere"], "there is no folder nowhere"),
        (["compare", "runs/sft/a"], "takes two runs or more"),
        (["delete", "runs"], "runs is not the folder of a run or a sweep; nothing was deleted"),
        (["delete", "runs/sft/b"], "to delete them without a question, add --yes"),
        (["delete", "--yes", "runs/sft/a"], "adapter.init_from of runs/sft/c, which could not go on without"),
    ],
)
def test_what_cannot_be_is_said_and_changes_nothing(runs, here, words, said):
    before = sorted((here / "runs").rglob("*"))
    assert said in runs(*words, code=2)
    assert sorted((here / "runs").rglob("*")) == before


def test_runs_are_deleted_together_with_what_stands_on_them(runs, here):
    assert "deleted 2 runs" in runs("delete", "--yes", "runs/sft/a", "runs/sft/c")
    assert [path.name for path in (here / "runs" / "sft").iterdir()] == ["b"]


def test_a_run_that_a_process_is_in_is_running_and_stays(runs, here):
    with open(here / "runs" / "sft" / "b" / ".lock") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert listed(runs("--json", "status=running")) == ["runs/sft/b"]
        assert "a process trains there now" in runs("delete", "--yes", "runs/sft/b", code=2)
    assert (here / "runs" / "sft" / "b" / "summary.json").exists()


def test_a_sweep_is_deleted_whole_or_not_at_all(runs, here):
    sweep = Path("runs/sweeps/x/1")
    sweep.mkdir(parents=True)
    (here / "runs" / "sft" / "b").rename(sweep / "00_b")
    for name in ("sweep.json", ".lock"):
        (sweep / name).write_text("{}")
    assert "is a job of the sweep runs/sweeps/x/1" in runs("delete", "--yes", str(sweep / "00_b"), code=2)
    assert "deleted 1 runs" in runs("delete", "--yes", str(sweep)) and not sweep.exists()


def test_without_any_run_it_says_so(here, capsys):
    assert cli.main(["runs"]) == 0
    assert capsys.readouterr().out == "no runs in runs/ yet\n"
