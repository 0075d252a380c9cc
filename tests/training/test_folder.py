"""Where a run begins: new folders, locks, and what a resume continues."""

import os
import shutil
import time
from dataclasses import asdict
from pathlib import Path

import pytest
import yaml

import mlxft
from mlxft.config import from_dict
from mlxft.errors import InputError
from mlxft.training.checkpoint import CheckpointStore
from mlxft.training.folder import open_run
from tests.permissions import as_nobody_in_a_folder
from tests.runs import STEPS, arrays, content, metrics, resaved, same, train, write_token_rows
from tests.tiny_models import make_model

pytestmark = pytest.mark.usefixtures("here")


def config(model, data, **more):
    return asdict(
        from_dict({"model.path": str(model), "data.train": str(data), "data.format": "tokens", **more})
    )


# ---- folders and locks ----


def test_a_run_without_a_folder_gets_one_named_for_what_it_is_and_the_time(model, data, here):
    with open_run("sft", config(model, data)) as start:
        assert start.run_dir.parent == Path("runs/sft") and start.step == 0
        assert abs(time.mktime(time.strptime(start.run_dir.name, "%Y-%m-%d_%H-%M-%S")) - time.time()) < 60


def test_runs_begun_in_the_same_second_get_folders_of_their_own(model, data):
    plain = config(model, data)
    with open_run("sft", plain) as one, open_run("sft", plain) as two, open_run("sft", plain) as three:
        assert len({one.run_dir, two.run_dir, three.run_dir}) == 3


def test_a_folder_is_one_process_at_a_time_and_free_afterwards(model, data, here):
    plain = config(model, data, **{"run.dir": "run"})
    with open_run("sft", plain):
        with pytest.raises(InputError, match="another process trains in run now"):
            with open_run("sft", plain):
                pass
    with open_run("sft", plain) as start:
        assert start.run_dir == Path("run")


@pytest.mark.parametrize("left", ["config.yaml", "checkpoints", "metrics.jsonl", "adapter", "summary.json"])
def test_a_folder_that_holds_a_run_or_part_of_one_is_refused_and_left_as_it_is(left, model, data, here):
    (here / "run" / left).mkdir(parents=True)
    with pytest.raises(InputError, match="run.dir=run holds a run already.* another run.dir keeps both"):
        with open_run("sft", config(model, data, **{"run.dir": "run"})):
            pass
    assert [path.name for path in (here / "run").iterdir()] == [left]


@pytest.mark.parametrize("resume", ["none", "auto", "other run"])
@pytest.mark.parametrize("where", ["run", ".", "{}"])
def test_a_folder_that_holds_something_else_is_refused_and_nothing_is_put_there(
    where, resume, finished, model, data, here, monkeypatch
):
    """By its name, as the folder one is in, and as a full path."""
    place = shutil.copytree(model, here / "run")
    (place / ".hidden").write_text("mine")
    (place / ".lock").write_text("some program's")
    if where == ".":
        monkeypatch.chdir(place)
    before = content(place)
    more = {"run.dir": where.format(place), "trainer.resume": finished if resume == "other run" else resume}
    with pytest.raises(InputError) as refusal:
        with open_run("sft", config(model, data, **{key: str(value) for key, value in more.items()})):
            pass
    folder = Path(more["run.dir"])
    assert str(refusal.value) == (
        f"run.dir={folder} is not the folder of a run: it holds .hidden, chat_template.jinja, config.json, "
        "model.safetensors, tokenizer.json and 1 more. Nothing was written there. Give a folder that is new "
        f"or empty, for instance run.dir={folder / 'run'}"
    )
    assert content(place) == before and (place / ".lock").read_text() and not (place / "train.log").exists()


@pytest.mark.parametrize("resume", ["none", "auto"])
def test_notes_beside_a_run_that_is_still_loading_do_not_hide_it(resume, model, data, here):
    with open_run("sft", config(model, data, **{"run.dir": "run"})):
        (here / "run" / "notes.txt").write_text("mine")
        with pytest.raises(InputError, match="another process trains in run now"):
            with open_run("sft", config(model, data, **{"run.dir": "run", "trainer.resume": resume})):
                pass


@pytest.mark.parametrize("resume", ["none", "auto"])
def test_the_root_of_the_disk_is_no_runs_folder(resume, model, data):
    with pytest.raises(InputError, match="run.dir=/ is not the folder of a run: it holds .*run.dir=/run"):
        with open_run("sft", config(model, data, **{"run.dir": "/", "trainer.resume": resume})):
            pass


@pytest.mark.parametrize("resume", ["none", "auto"])
@pytest.mark.parametrize("names", [[], [".lock", "train.log"], ["lost+found"]])
def test_an_empty_folder_and_one_that_a_run_left_early_are_used(names, resume, model, data, here):
    (here / "run").mkdir()
    for name in names:
        (here / "run" / name).write_text("")
    more = {"run.dir": "run", "trainer.resume": resume}
    with open_run("sft", config(model, data, **more)) as start:
        assert (start.run_dir, start.step) == (Path("run"), 0)
    assert {path.name for path in (here / "run").iterdir()} >= set(names)


def test_a_run_with_notes_beside_it_goes_on_and_so_does_one_whose_lock_is_gone(run, model, data):
    (run / "notes.txt").write_text("mine")
    (run / ".lock").unlink()
    train(model, data, run, *STEPS, "trainer.max_steps=5", "trainer.resume=auto")
    assert [line["step"] for line in metrics(run, "train")] == [1, 2, 3, 4, 5]
    assert (run / "notes.txt").read_text() == "mine"


def test_a_foreign_folder_is_refused_every_time(model, data, here):
    """A refusal leaves no lock behind, which would make the folder a run's."""
    (here / "run").mkdir()
    (here / "run" / "config.yaml").write_text("mine")
    for _ in range(2):
        with pytest.raises(InputError, match="holds files that this would overwrite"):
            with open_run("sft", config(model, data, **{"run.dir": "run", "trainer.resume": "auto"})):
                pass
    assert [path.name for path in (here / "run").iterdir()] == ["config.yaml"]


@pytest.mark.parametrize(
    "left, how",
    [
        ([".lock"], "trainer.resume=auto starts it afresh, since it has no checkpoint; "),
        ([".lock", "summary.json"], ""),
        (["checkpoints/step-000001"], "trainer.resume=auto continues it; "),
        ([], ""),
    ],
)
def test_what_is_said_of_a_run_that_is_there_is_what_auto_would_do(left, how, model, data, here):
    for name in [*left, "config.yaml"]:
        (here / "run" / name).mkdir(parents=True) if "/" in name else (here / "run").mkdir(exist_ok=True)
        if "/" not in name:
            (here / "run" / name).write_text("")
    with pytest.raises(InputError) as refusal:
        with open_run("sft", config(model, data, **{"run.dir": "run"})):
            pass
    assert str(refusal.value) == f"run.dir=run holds a run already. {how}another run.dir keeps both"


# ---- permissions ----


@pytest.mark.parametrize("closed", ["run", "run/checkpoints"])
@pytest.mark.parametrize("resume", ["none", "auto"])
def test_a_folder_without_permission_to_write_is_said_before_anything_is_read(closed, resume, model, data):
    plain = config(model, data)  # whose files root alone may see
    with as_nobody_in_a_folder() as place:
        os.makedirs(place / "run" / "checkpoints")
        (place / "run" / ".lock").write_text("")
        (place / "run" / "train.log").write_text("")
        os.chmod(place / closed, 0o555)
        plain["run"]["dir"], plain["trainer"]["resume"] = str(place / "run"), resume
        with pytest.raises(InputError) as refusal, open_run("sft", plain):
            pass
        os.chmod(place / closed, 0o755)
    assert f"no permission to make files in {place / closed}. Allow that, or" in str(refusal.value)


def test_what_fails_before_it_begins_leaves_no_folder(model, data, here):
    with pytest.raises(ZeroDivisionError):
        with open_run("sft", config(model, data)):
            1 / 0  # noqa: B018
    assert list(here.iterdir()) == []


# ---- resume=auto ----


def test_auto_continues_the_given_run(run, finished, model, data):
    more = [*STEPS, "trainer.max_steps=6", f"data.valid={data}", "trainer.eval_every=1"]
    train(model, data, run, *more, "trainer.resume=auto")
    assert metrics(run) == metrics(finished)
    assert same(arrays(run / "adapter"), arrays(finished / "adapter"))
    assert same(arrays(run / "best"), arrays(finished / "best"))


def test_auto_without_a_run_starts_afresh_and_says_so(model, data, here, caplog):
    train(model, data, here / "new", "trainer.resume=auto", "trainer.max_steps=1", "adapter.rank=2")
    assert f"no checkpoint to continue in {here / 'new'}, starting afresh" in caplog.text


def auto(model, data, **more):
    with open_run("sft", config(model, data, **{"trainer.resume": "auto"}, **more)) as start:
        return start


def place(run: Path, name: str, config: dict | None = None) -> Path:
    """Puts a copy of the run among those of sft, with the configuration if one is given."""
    folder = Path("runs/sft") / name
    shutil.copytree(run, folder, symlinks=True)
    if config is not None:
        (folder / "config.yaml").write_text(yaml.safe_dump(config))
    return folder


def test_auto_without_a_folder_finds_the_newest_run_that_trains_the_same_way(run, model, data):
    same_way = {"adapter.rank": 2, "trainer.max_steps": 6}
    wanted = config(model, data, **same_way)
    place(run, "a", wanted)
    newest = place(run, "b", wanted | {"run": {"dir": "elsewhere"}})
    place(run, "c", config(model, data, **same_way, **{"optimizer.lr": 0.5}))
    shutil.rmtree(place(run, "d", wanted) / "checkpoints")
    (place(run, "e", wanted) / "config.yaml").write_text("{")
    (place(run, "f", wanted) / "config.yaml").write_text("5")
    for folder in Path("runs/sft").iterdir():
        state = folder / "checkpoints" / "step-000004"
        if state.exists():
            resaved(state, config=wanted)
    assert auto(model, data, **same_way).run_dir == newest
    assert auto(model, data, **same_way, **{"trainer.save_every": 7}).run_dir == newest
    fresh = auto(model, data, **{"adapter.rank": 2, "trainer.max_steps": 7})
    assert fresh.continuation is None and fresh.run_dir.parent == Path("runs/sft")


def test_auto_of_an_ended_run_whose_checkpoints_are_gone_keeps_it(finished, model, data, here):
    shutil.copytree(finished, here / "run", symlinks=True)
    shutil.rmtree(here / "run" / "checkpoints")
    before = content(here / "run")
    with pytest.raises(InputError, match="holds a run that has ended, without a checkpoint to continue"):
        train(model, data, here / "run", *STEPS, "trainer.resume=auto", "trainer.max_steps=6")
    assert content(here / "run") == before


def test_a_finished_run_resumed_is_as_it_was(finished, model, data, here):
    shutil.copytree(finished, here / "run", symlinks=True)
    more = [*STEPS, "trainer.max_steps=6", f"data.valid={data}", "trainer.eval_every=1"]
    result = train(model, data, here / "run", *more, "trainer.resume=auto")
    assert (result.status, result.steps) == ("completed", 6)
    assert metrics(here / "run") == metrics(finished)
    assert same(arrays(here / "run" / "adapter"), arrays(finished / "adapter"))


def test_a_finished_run_can_be_given_more_steps(finished, model, data, here, caplog):
    """With a constant rate it is then the run that was given them from the start."""
    more = [*STEPS, "schedule=constant"]
    train(model, data, here / "run", *more, "trainer.max_steps=2")
    train(model, data, here / "run", *more, "trainer.max_steps=4", "trainer.resume=auto")
    train(model, data, here / "straight", *more, "trainer.max_steps=4")
    assert metrics(here / "run") == metrics(here / "straight")
    assert "resuming with trainer.max_steps=4 (was 2)" in caplog.text


def test_fewer_steps_than_are_done_are_refused(run, model, data):
    before = content(run)
    with pytest.raises(InputError, match="has 4 steps done, and the run is to have 3"):
        train(model, data, run, *STEPS, "trainer.max_steps=3", "trainer.resume=auto")
    assert content(run) == before


# ---- resume=PATH ----


def test_a_run_given_by_its_folder_goes_on_in_it(run, finished, model, data):
    more = [*STEPS, "trainer.max_steps=6", f"data.valid={data}", "trainer.eval_every=1"]
    result = continued(model, data, run, *more)
    assert result.run_dir == run.resolve()
    assert metrics(run) == metrics(finished)


def continued(model, data, path, *more):
    return mlxft.train(
        [f"model.path={model}", f"data.train={data}", "data.format=tokens", f"trainer.resume={path}", *more]
    )


@pytest.mark.parametrize("path", ["checkpoints/step-000004", "checkpoints/last"])
def test_the_newest_checkpoint_goes_on_in_its_run(path, run, model, data):
    (run / "checkpoints" / "last").unlink()
    (run / "checkpoints" / "last").symlink_to("step-000004")
    assert continued(model, data, run / path, *STEPS, "trainer.max_steps=5").run_dir == run.resolve()
    assert [line["step"] for line in metrics(run, "train")] == [1, 2, 3, 4, 5]


def test_an_older_checkpoint_goes_on_in_a_new_folder_and_the_old_run_is_untouched(
    finished, model, data, here
):
    before = content(finished)
    more = [*STEPS, "trainer.max_steps=6", f"data.valid={data}", "trainer.eval_every=1"]
    result = continued(model, data, finished / "checkpoints" / "step-000003", *more)
    assert result.run_dir.parent == Path("runs/sft")
    assert metrics(result.run_dir) == metrics(finished)
    assert same(arrays(result.adapter), arrays(finished / "adapter"))
    assert same(arrays(result.run_dir / "best"), arrays(finished / "best"))
    assert content(finished) == before


def test_a_checkpoint_goes_on_in_a_folder_that_is_given(finished, model, data, here):
    result = train(model, data, here / "more", *STEPS, "trainer.max_steps=6",
                   f"trainer.resume={finished / 'checkpoints' / 'step-000005'}")  # fmt: skip
    assert result.run_dir == here / "more"
    assert [line["step"] for line in metrics(here / "more", "train")] == [1, 2, 3, 4, 5, 6]
    # Its best step's adapter came along, though nothing was validated here.
    assert same(arrays(here / "more" / "best"), arrays(finished / "checkpoints" / "step-000005"))


def test_a_finished_checkpoint_continued_elsewhere_leaves_a_whole_run(finished, model, data, here):
    train(model, data, here / "copy", *STEPS, "trainer.max_steps=6", f"trainer.resume={finished}")
    assert CheckpointStore(here / "copy").latest().step == 6
    assert same(arrays(here / "copy" / "adapter"), arrays(finished / "adapter"))


def test_a_checkpoint_out_of_its_run_goes_on_without_the_runs_metrics(finished, model, data, here, caplog):
    shutil.copytree(finished / "checkpoints" / "step-000005", here / "kept")
    train(model, data, here / "more", *STEPS, "trainer.max_steps=6", "trainer.resume=kept")
    assert [line["step"] for line in metrics(here / "more")] == [6]
    assert "metrics.jsonl is missing: it starts anew with step 6" in caplog.text


def test_going_back_within_a_given_folder_is_refused(finished, model, data):
    before = content(finished)
    with pytest.raises(InputError, match="holds later steps than .*step-000003, which would be overwritten"):
        train(model, data, finished, *STEPS, f"trainer.resume={finished / 'checkpoints' / 'step-000003'}")
    assert content(finished) == before


@pytest.mark.parametrize(
    "make, words",
    [
        (lambda path: None, "there is no such folder. Give a run's folder"),
        (lambda path: path.mkdir(), "is not a whole checkpoint: manifest.json cannot be read"),
        (lambda path: (path / "checkpoints").mkdir(parents=True), "the run has no checkpoint yet"),
        (lambda path: path.write_text(""), "there is no such folder"),
    ],
)
def test_a_place_without_a_checkpoint_is_refused(make, words, model, data, here):
    make(here / "place")
    with pytest.raises(InputError, match=words):
        continued(model, data, "place")
    assert not (here / "runs").exists()


def test_a_name_that_no_folder_can_have_is_refused_in_a_sentence(model, data):
    with pytest.raises(InputError, match="there is no such folder"):
        continued(model, data, "x" * 300)


def test_a_run_that_is_still_loading_is_said_to_have_no_checkpoint_yet(model, data, here):
    with open_run("sft", config(model, data, **{"run.dir": "two"})):
        for _ in range(2):
            with pytest.raises(InputError, match="=two: a process trains in this run now, and there is no"):
                continued(model, data, "two")
        (here / "two" / "checkpoints").mkdir()
        with pytest.raises(InputError, match="=two: a process trains in this run now, and there is no"):
            continued(model, data, "two")
        (here / "two" / "config.yaml").write_text("begun")
    with pytest.raises(InputError, match="trainer.resume=two: the run has no checkpoint yet"):
        continued(model, data, "two")


def test_a_checkpoint_of_the_adapter_alone_cannot_be_continued(model, data, here):
    train(
        model, data, here / "run", "adapter.rank=2", "trainer.max_steps=1", "trainer.save_only_adapter=true"
    )
    before = content(here / "run")
    with pytest.raises(InputError, match="holds only the adapter .*adapter.init_from=.*step-000001"):
        train(model, data, here / "run", "adapter.rank=2", "trainer.max_steps=2", "trainer.resume=auto")
    assert content(here / "run") == before


def test_a_checkpoint_that_does_not_say_what_it_is_of_is_refused(run, model, data):
    checkpoint = run / "checkpoints" / "step-000004"
    (checkpoint / "state.json").write_text('{"step": 4}')
    (checkpoint / "manifest.json").write_text("{}")
    with pytest.raises(InputError, match="does not say what it was trained with"):
        train(model, data, run, *STEPS, "trainer.resume=auto")


def test_steps_beyond_a_million_are_still_in_order(here):
    folders = [here / "checkpoints" / name for name in ("step-999999", "step-1000000", "step-5.old")]
    for folder in folders:
        folder.mkdir(parents=True)
    assert CheckpointStore(here).folders() == folders[:2]


def test_a_folder_of_somebody_elses_files_is_not_trained_over(tmp_path):
    """`auto` starts afresh only where a killed run left nothing but what it would write again."""
    folder = tmp_path / "foreign"
    (folder / "adapter").mkdir(parents=True)
    (folder / "adapter" / "adapters.safetensors").write_text("precious")
    model = make_model(tmp_path / "model", "llama", num_hidden_layers=1)
    data = write_token_rows(tmp_path / "rows.jsonl", [5, 6])
    with pytest.raises(InputError, match="holds files that this would overwrite"):
        train(model, data, folder, "trainer.resume=auto", "trainer.max_steps=1")
    assert (folder / "adapter" / "adapters.safetensors").read_text() == "precious"
