"""What training refuses before it reads a model, the commands that take its configuration refuse too."""

import json
import shutil

import pytest

from mlxft import cli
from tests.runs import content, train, write_rows, write_token_rows
from tests.tiny_models import make_model

STARTED = ["adapter.rank=2", "trainer.max_steps=2", "schedule=constant"]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with a model, nine rows (three steps an epoch), pairs, a run of two steps and a letter.

    Its model is also there without a tokenizer.
    """
    folder = tmp_path_factory.mktemp("place")
    make_model(folder / "model", "llama", num_hidden_layers=1)
    shutil.copytree(folder / "model", folder / "bare", ignore=shutil.ignore_patterns("tokenizer*"))
    write_token_rows(folder / "rows.jsonl", [12] * 9)
    write_token_rows(folder / "others.jsonl", [13] * 9)
    write_rows(folder / "pairs.jsonl", [{"prompt_ids": [5], "chosen_ids": [7], "rejected_ids": [8]}] * 9)
    (folder / "letters").mkdir()
    (folder / "letters" / "letter.txt").write_text("Dear")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        train("./model", "rows.jsonl", folder / "run", *STARTED)
    return folder


REFUSED = {
    "a warm-up as long as the run": (["schedule.warmup_steps=3"], "not fewer than the run's 3 steps"),
    "a rate that falls before it has risen": (
        ["schedule=wsd", "schedule.warmup_steps=2", "schedule.decay_share=0.6"],
        "are more than the run's 3",
    ),
    "a resume of nothing": (["trainer.resume=gone"], "trainer.resume=gone: there is no such folder"),
    "a resume with other settings": (
        [*STARTED, "trainer.resume=run", "trainer.seed=1"],
        "was trained with other settings",
    ),
    "a resume with other rows": (
        [*STARTED, "trainer.resume=run", "data.train=others.jsonl"],
        "was trained on rows with other tokens",
    ),
    "a resume of what is done": (
        [*STARTED, "trainer.resume=run", "trainer.max_steps=1"],
        "has 2 steps done, and the run is to have 1",
    ),
    "a folder with a run": (["run.dir=run"], "run.dir=run holds a run already"),
    "a folder with something else": (["run.dir=letters"], "run.dir=letters is not the folder of a run"),
    "a resume into a folder with a run": (
        [*STARTED, "trainer.resume=run/checkpoints/step-000002", "run.dir=letters"],
        "run.dir=letters is not the folder of a run",
    ),
    "an adapter that is not there": (
        ["adapter.init_from=gone"],
        "the adapter folder gone cannot be read: No such file",
    ),
    "weights that are not there": (
        ["adapter=full", "adapter.init_from=gone"],
        "the adapter folder gone cannot be read: No such file",
    ),
    "a reference that is not there": (
        ["trainer=dpo", "data.train=pairs.jsonl", "loss.reference=gone"],
        "loss.reference: there is no folder",
    ),
    "questions without a tokenizer": (["model.path=./bare", "trainer.samples=[Who?]"], "has no tokenizer"),
}
CASES = [
    (command, what)
    for command in ("train", "plan", "preview")
    for what in REFUSED
    if (command, what) != ("preview", "a resume with other rows")  # which may be there to be looked at
]


@pytest.mark.parametrize("command, what", CASES)
def test_what_training_refuses_is_refused_by_every_command(command, what, place, capsys, monkeypatch):
    monkeypatch.chdir(place)
    overrides, words = REFUSED[what]
    before = content(place)
    given = ["model.path=./model", "data.train=rows.jsonl", "data.format=tokens", *overrides]
    assert cli.main([command, *given]) == 2
    assert words in capsys.readouterr().err
    assert content(place) == before


def test_an_adapter_that_does_not_fit_whole_weights_is_refused_by_a_plan(place, capsys, monkeypatch):
    """Its weights are not read: the header tells."""
    monkeypatch.chdir(place)
    given = ["model.path=./model", "data.train=rows.jsonl", "data.format=tokens"]
    assert cli.main(["plan", *given, "adapter=full", "adapter.init_from=run/adapter"]) == 2
    assert "which is an adapter of kind lora" in capsys.readouterr().err


def test_a_plan_of_a_run_that_is_continued_is_its_own(place, capsys, monkeypatch):
    """A continued run keeps the way its first part took."""
    monkeypatch.chdir(place)
    given = ["model.path=./model", "data.train=rows.jsonl", "data.format=tokens", *STARTED]
    train(
        "./model",
        "rows.jsonl",
        place / "segmented",
        *STARTED,
        "trainer=segmented",
        "trainer.segment_layers=1",
    )
    capsys.readouterr()
    more = ["trainer.resume=segmented", "trainer.max_steps=3"]
    assert cli.main(["plan", "--json", *given, *more]) == 0
    assert json.loads(capsys.readouterr().out)["taken"]["kind"] == "segmented"
