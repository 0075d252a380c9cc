"""What goes wrong with a run's input, its gradients, and what it is to continue."""

import json
import shutil
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from mlxft import cli
from mlxft.training.checkpoint import CheckpointStore
from tests.permissions import as_nobody_in_a_folder
from tests.runs import STEPS, arrays, column, content, metrics, same, train, write_rows, write_token_rows
from tests.tiny_models import make_model

pytestmark = pytest.mark.usefixtures("here")

LENGTHS = [5, 9, 30, 7, 12, 18, 6, 25, 11, 4]
RARE = 250  # a token that neither the rows nor the check of the model's view has


def settings(model, rows, *more) -> list[str]:
    return [f"model.path={model}", f"data.train={rows}", "data.format=tokens", "adapter.rank=2", *more]


# ---- input ----


@pytest.mark.parametrize(
    "line, words",
    [
        ('{"input_ids": [5, 6', "rows.jsonl:3: not JSON"),
        ('{"input_ids": [5, 999], "completion_mask": [0, 1]}', "rows.jsonl:3"),
        ('{"input_ids": [5, 6], "completion_mask": [1]}', "rows.jsonl:3"),
        ('{"text": 5}', "rows.jsonl:3"),
    ],
)
def test_a_malformed_row_is_named_by_file_and_line_and_leaves_no_folder(line, words, model, here, refused):
    row = json.dumps({"input_ids": [5, 6, 7], "completion_mask": [0, 1, 1]})
    (here / "rows.jsonl").write_text(f"{row}\n{row}\n{line}\n")
    assert words in refused(*settings(model, "rows.jsonl"))
    assert not (here / "runs").exists()


@pytest.mark.parametrize(
    "key", ["data.train", "data.valid", "adapter.init_from", "model.path", "loss.reference"]
)
@pytest.mark.parametrize("name", ["x" * 300, "closed/x"])
def test_a_path_that_cannot_be_looked_at_is_said(key, name, model, rows, refused):
    """Its name is too long, or its folder is somebody else's."""
    objective = ["trainer=dpo"] if key == "loss.reference" else []
    with as_nobody_in_a_folder() as folder:
        (folder / "closed").mkdir(mode=0o000)
        said = refused(*settings(model, rows, *objective, f"{key}={folder / name}"))
    assert any(why in said for why in ("File name too long", "Permission denied", "there is no"))


def test_rows_without_any_target_are_an_error_and_leave_a_given_folder_as_it_was(model, here, refused):
    write_rows(here / "rows.jsonl", [{"input_ids": [5, 6, 7], "completion_mask": [0, 0, 0]}] * 2)
    (here / "run").mkdir()
    assert "nothing to train on in 2 rows" in refused(*settings(model, "rows.jsonl", "run.dir=run"))
    assert list((here / "run").iterdir()) == []


def a_file(folder):
    shutil.rmtree(folder)
    folder.write_text("")


def cut_short(folder):
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])


def a_folder_for_a_file(folder):
    (folder / "config.json").unlink()
    (folder / "config.json").mkdir()


@pytest.mark.parametrize(
    "damage, words",
    [
        (shutil.rmtree, "there is no"),
        (a_file, "is a file"),
        (lambda folder: (folder / "model.safetensors").unlink(), "has no model*.safetensors"),
        (cut_short, "model.safetensors"),
        (a_folder_for_a_file, "config.json"),
        (lambda folder: (folder / "config.json").write_bytes(b"\xff{"), "config.json"),
    ],
)
def test_a_model_that_cannot_be_read_is_said_and_leaves_no_folder(damage, words, model, rows, here, refused):
    broken = here / "broken"
    shutil.copytree(model, broken)
    damage(broken)
    said = refused(*settings(broken, rows, "run.dir=run"))
    assert words in said and "broken" in said
    assert not (here / "run").exists()


@pytest.mark.parametrize(
    "run_dir, words",
    [
        ("file", "there is a file of that name"),
        ("file/run", "there is a file of that name"),
        ("/proc/mlxft/run", "cannot be written"),
        ("x" * 300, "cannot be written: File name too long"),
    ],
)
@pytest.mark.parametrize("resume", ["none", "auto"])
def test_a_run_folder_that_cannot_be_made_is_said(run_dir, words, resume, model, rows, here, refused):
    (here / "file").write_text("kept")
    said = refused(*settings(model, rows, f"run.dir={run_dir}", f"trainer.resume={resume}"))
    assert "run.dir=" in said and words in said
    assert (here / "file").read_text() == "kept"


@pytest.mark.parametrize("run_dir", ["link", "link/run"])
def test_a_run_folder_that_is_a_link_to_nowhere_is_said(run_dir, model, rows, here, refused):
    (here / "link").symlink_to("gone")
    said = refused(*settings(model, rows, f"run.dir={run_dir}"))
    assert f"run.dir={run_dir} cannot be written: link is a link to gone, which is not there" in said
    assert (here / "link").is_symlink() and not (here / "gone").exists()


@pytest.mark.parametrize(
    "reference, words",
    [
        ("gone", "loss.reference: there is no folder"),
        ("./gone", "loss.reference: there is no ./gone"),
        ("empty", "loss.reference: empty has no config.json and no model*.safetensors"),
    ],
)
def test_a_reference_that_is_not_there_is_said_before_anything_is_read(
    reference, words, model, here, refused
):
    (here / "empty").mkdir()
    pair = {"prompt_ids": [5, 6], "chosen_ids": [7], "rejected_ids": [8]}
    data = write_rows(here / "pairs.jsonl", [pair] * 2)
    said = refused(*settings(model, data, "trainer=dpo", f"loss.reference={reference}"))
    assert words in said
    assert "in memory" not in said and "training rows" not in said


def test_a_reference_that_has_no_embedding_for_a_token_is_refused_before_models_are_read(
    model, here, refused
):
    """Reading beyond an embedding would give numbers all the same."""
    small = make_model(here / "small", "llama", num_hidden_layers=1, vocab_size=64)
    pairs = [{"prompt_ids": [5, 6], "chosen_ids": [63], "rejected_ids": [last]} for last in (8, 64)]
    data = write_rows(here / "pairs.jsonl", pairs)
    said = refused(*settings(model, data, "trainer=dpo", f"loss.reference={small}"))
    assert f"{data}:2: token 64 is beyond the vocabulary of loss.reference, which ends at 63." in said
    assert "in memory" not in said
    labelled = {"prompt_ids": [64], "completion_ids": [7], "label": True}
    data = write_rows(here / "labelled.jsonl", [labelled] * 2)
    said = refused(*settings(model, data, "trainer=kto", f"loss.reference={small}"))
    assert f"{data}:1: token 64 is beyond the vocabulary of loss.reference" in said


def test_a_folder_of_logs_instead_of_a_log_is_said(model, rows, here, refused):
    (here / "run" / "train.log").mkdir(parents=True)
    assert "train.log cannot be written" in refused(*settings(model, rows, "run.dir=run"))


def test_questions_to_a_model_without_a_tokenizer_are_refused_before_the_run_begins(
    model, rows, here, refused
):
    silent = here / "silent"
    shutil.copytree(model, silent, ignore=shutil.ignore_patterns("tokenizer*"))
    said = refused(*settings(silent, rows, "run.dir=run", "trainer.samples=[Why?]"))
    assert "silent has no tokenizer" in said
    assert not (here / "run").exists()


# ---- gradients that are not finite ----


def spoil(folder: Path, change) -> None:
    """Changes the arrays of a model's or an adapter's folder."""
    [file] = folder.glob("*.safetensors")
    tensors = mx.load(str(file))
    change(tensors)
    mx.save_safetensors(str(file), dict(tensors), {"format": "mlx"})


def test_three_bad_steps_in_a_row_stop_with_3_and_leave_weights_and_checkpoints(model, rows, here, refused):
    """An adapter whose values overflow makes every loss NaN."""
    train(model, rows, here / "first", "trainer.max_steps=2", "adapter.rank=2")
    before = content(here / "first" / "checkpoints")
    adapter = here / "first" / "adapter"
    name = next(iter(arrays(adapter)))
    spoil(adapter, lambda tensors: tensors.update({name: mx.full(tensors[name].shape, 3e38)}))
    said = refused(
        *settings(model, rows, "run.dir=run", f"adapter.init_from={adapter}", "trainer.save_every=5"),
        code=3,
    )
    assert "the gradients of steps 1 to 3 were not finite" in said and "are intact" in said
    assert f"come out of layer {name.split('.')[2]} of 2 (counted from 0)" in said
    lines = metrics(here / "run")
    assert [(line["step"], line["loss"], line["grad_norm"], line["skipped"]) for line in lines] == [
        (step, None, None, step) for step in (1, 2, 3)
    ]
    assert "NaN" not in (here / "run" / "metrics.jsonl").read_text()
    assert not (here / "run" / "checkpoints").exists() and not (here / "run" / "adapter").exists()
    assert content(here / "first" / "checkpoints") == before


def test_a_bad_step_in_the_middle_is_skipped_and_training_goes_on(model, here):
    """A token whose embedding is infinite stands in the second row of four, one row a step."""
    broken = here / "broken"
    shutil.copytree(model, broken)
    name = "model.embed_tokens.weight"
    spoil(broken, lambda tensors: tensors.update({name: tensors[name].at[RARE].add(mx.inf)}))
    ids = [[5, 6, 7, 8], [5, RARE, 7, 8], [9, 8, 7, 6], [5, 5, 6, 6]]
    rows = [{"input_ids": row, "completion_mask": [0, 0, 1, 1]} for row in ids]
    data = write_rows(here / "rows.jsonl", rows)
    result = train(broken, data, here / "run", *STEPS, "data.batch_size=1", "data.shuffle=false")
    assert result.status == "completed"
    lines = metrics(here / "run")
    assert [line["loss"] is None for line in lines] == [False, True, False, False]
    assert ["skipped" in line for line in lines] == [False, True, False, False]
    one, two, three = (arrays(here / "run" / "checkpoints" / f"step-00000{step}") for step in (1, 2, 3))
    assert same(one, two) and not same(two, three)
    assert all(mx.isfinite(array).all() for array in arrays(result.adapter).values())
    assert json.loads((here / "run" / "summary.json").read_text())["skipped_steps"] == 1
    said = f"In the forward of {data}:2 the first values that are not finite come out of the embedding"
    assert said in (here / "run" / "train.log").read_text()


def test_weights_that_are_not_finite_are_not_saved(model, rows, here, refused):
    """Adam divides the learning rate by 1 - 0.9 in its first step: 3e38 becomes infinite in float32."""
    more = ["run.dir=run", "optimizer.lr=3e38", "trainer.max_steps=1"]
    said = refused(*settings(model, rows, *more), code=3)
    assert "after step 1 there are weights that are not finite" in said and "Lower optimizer.lr" in said
    assert not (here / "run" / "checkpoints").exists() and not (here / "run" / "adapter").exists()


# ---- checkpoints and rows at a resume ----


@pytest.fixture
def run(model, rows, here):
    """A run of four steps with a checkpoint of each, and the settings that continue it."""
    more = settings(model, rows, "run.dir=run", "trainer.save_every=1", "trainer.keep=all")
    assert cli.main(["train", *more, "trainer.max_steps=4"]) == 0
    shutil.rmtree(here / "run" / "checkpoints" / "step-000004")
    return [*more, "trainer.max_steps=4"]


def damage(run_dir: Path, step: int) -> None:
    (run_dir / "checkpoints" / f"step-{step:06d}" / "optimizer.safetensors").write_bytes(b"short")


def test_a_damaged_checkpoint_is_passed_over_with_a_warning(run, here, capsys):
    before = metrics(here / "run")
    damage(here / "run", 3)
    assert cli.main(["train", *run, "trainer.resume=auto"]) == 0
    warning = "passing over a damaged checkpoint"
    assert warning in capsys.readouterr().err and warning in (here / "run" / "train.log").read_text()
    assert metrics(here / "run") == before
    assert CheckpointStore(here / "run").latest().step == 4


def test_only_damaged_checkpoints_are_an_error_that_changes_nothing(run, here, refused):
    for step in (1, 2, 3):
        damage(here / "run", step)
    before = content(here / "run")
    said = refused(*run, "trainer.resume=auto")
    assert "all checkpoints in" in said and "are damaged (3 found)" in said
    assert content(here / "run") == before


def test_rows_that_changed_are_refused_before_anything_in_the_folder_changes(run, model, here, refused):
    other = write_token_rows(here / "other.jsonl", LENGTHS, seed=1)
    before = content(here / "run")
    said = refused(*run, f"data.train={other}", "trainer.resume=auto", "optimizer.lr=1")
    assert "was trained on rows with other tokens" in said
    assert "rows.jsonl' in the checkpoint, " in said and f"{other.name}' now" in said
    assert content(here / "run") == before


def test_a_file_of_rows_that_changed_under_its_name_is_refused(model, here, refused):
    data = write_token_rows(here / "rows.jsonl", LENGTHS)
    more = settings(model, data, "run.dir=run")
    assert cli.main(["train", *more]) == 0
    write_token_rows(data, [*LENGTHS[:-1], 5])
    said = refused(*more, "trainer.resume=auto", "trainer.epochs=2")
    assert "was trained on rows with other tokens" in said and "the files they name have" in said


def test_a_missing_metrics_file_starts_anew_with_a_warning(run, here, capsys):
    before = metrics(here / "run")
    (here / "run" / "metrics.jsonl").unlink()
    (here / "run" / "samples_before.json").unlink()
    assert cli.main(["train", *run, "trainer.resume=auto"]) == 0
    assert "metrics.jsonl is missing: it starts anew with step 4" in capsys.readouterr().err
    assert metrics(here / "run") == before[3:]
    assert np.isfinite(column(here / "run", "loss")).all()


@pytest.mark.parametrize(
    "content", [b"[{", b"\xff", b"5", b"null", b'["a"]', b'[{"question": "a"}]', b'{"a": 1}']
)
def test_damaged_answers_from_before_training_are_passed_over_with_a_warning(content, run, here, capsys):
    before = metrics(here / "run")
    (here / "run" / "samples_before.json").write_bytes(content)
    assert cli.main(["train", *run, "trainer.resume=auto"]) == 0
    assert "samples_before.json cannot be read" in capsys.readouterr().err
    assert metrics(here / "run") == before
    assert json.loads((here / "run" / "summary.json").read_text())["samples"] == {"before": [], "after": []}


def test_a_run_that_failed_before_it_began_leaves_its_folder_free_for_the_next(model, rows, here, refused):
    (here / "bad.jsonl").write_text("{}\n")
    refused(*settings(model, "bad.jsonl", "run.dir=run"))
    assert cli.main(["train", *settings(model, rows, "run.dir=run")]) == 0
