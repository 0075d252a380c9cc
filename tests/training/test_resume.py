"""What may change between a run and its continuation, and what of the checkpoint has to fit."""

import json
import shutil
from dataclasses import asdict
from pathlib import Path

import pytest
import yaml

from mlxft.config import from_dict
from mlxft.errors import InputError
from mlxft.models.fingerprint import weight_digests
from mlxft.training.resume import same_training, settings
from tests.runs import STEPS, arrays, content, metrics, resaved, same, train, write_rows, write_token_rows
from tests.tiny_models import make_model

pytestmark = pytest.mark.usefixtures("here")


@pytest.mark.parametrize(
    "changed, words",
    [
        ("adapter.rank=4", "adapter.rank: 2 in the checkpoint, 4 now"),
        ("adapter.alpha=32", "adapter.alpha: 4 in the checkpoint, 32.0 now"),
        ("adapter.targets=[q_proj]", "adapter.targets: None in the checkpoint, ['q_proj'] now"),
        ("adapter.layers=1", "adapter.layers: 'all' in the checkpoint, 'last 1' now"),
        ("optimizer=lion", "optimizer.name: 'adamw' in the checkpoint, 'lion' now"),
        ("data.batch_size=3", "data.batch_size: 4 in the checkpoint, 3 now"),
        ("data.max_length=8", "data.max_length: 2048 in the checkpoint, 8 now"),
        ("trainer.seed=1", "trainer.seed: 0 in the checkpoint, 1 now"),
        ("model.dtype=float16", "model.dtype: 'auto' in the checkpoint, 'float16' now"),
    ],
)
def test_settings_that_do_not_fit_are_refused_with_both_values(changed, words, run, model, data):
    before = content(run)
    with pytest.raises(InputError) as refusal:
        train(model, data, run, *STEPS, "trainer.max_steps=6", "trainer.resume=auto", changed)
    assert words in str(refusal.value) and "adapter.init_from=" in str(refusal.value)
    assert content(run) == before


def test_other_settings_may_change_with_a_warning_in_the_log_too(run, model, data, caplog):
    more = [*STEPS, "trainer.max_steps=6", "trainer.resume=auto", "optimizer.lr=0.5", "trainer.keep=1"]
    train(model, data, run, *more)
    words = "resuming with optimizer.lr=0.5 (was 0.01): the run will differ from one never stopped"
    assert words in caplog.text and words in (run / "train.log").read_text()
    assert "trainer.keep" not in caplog.text
    assert yaml.safe_load((run / "config.yaml").read_text())["optimizer"]["lr"] == 0.5
    assert metrics(run, "train")[-1]["lr"] > 1e-2


def test_what_is_written_out_may_be_what_was_left_to_the_default(run, model, data, caplog):
    names = "[q_proj,k_proj,v_proj,o_proj,gate_proj,up_proj,down_proj]"
    same_adapter = ["adapter.alpha=4", "adapter.layers=2", f"adapter.targets={names}"]
    train(model, data, run, *STEPS, "trainer.max_steps=6", "trainer.resume=auto", *same_adapter)
    assert "resuming with adapter" not in caplog.text
    assert "resumed from step 4" in caplog.text


def test_the_same_file_by_another_name_is_the_same(run, finished, model, data, here, monkeypatch, caplog):
    """Written from elsewhere, through a link, as a list of one, or moved: its rows decide."""
    (here / "deep" / "deeper").mkdir(parents=True)
    monkeypatch.chdir(here / "deep" / "deeper")
    (here / "deep" / "linked").symlink_to(model)
    shutil.copy(data, "moved.jsonl")
    more = [*STEPS, "trainer.max_steps=6", "trainer.resume=auto"]
    train("../linked", "[moved.jsonl]", run, *more)
    assert metrics(run, "train") == metrics(finished, "train")
    assert "resuming with data" not in caplog.text and "resuming with model" not in caplog.text


def test_a_run_begun_with_relative_paths_goes_on_from_another_folder(model, data, here, monkeypatch):
    shutil.copy(data, "rows.jsonl")
    Path("model").symlink_to(model)
    train("model", "rows.jsonl", here / "run", *STEPS, "trainer.max_steps=1")
    (here / "other").mkdir()
    monkeypatch.chdir(here / "other")
    more = [*STEPS, "trainer.max_steps=2", "trainer.resume=auto"]
    train("../model", "../rows.jsonl", here / "run", *more)
    assert [line["step"] for line in metrics(here / "run")] == [1, 2]


def test_other_validation_rows_are_a_warning(run, model, data, here, caplog):
    other = write_token_rows(here / "other.jsonl", [9, 4], seed=5)
    more = [*STEPS, "trainer.max_steps=6", "trainer.resume=auto", "trainer.eval_every=1"]
    train(model, data, run, *more, f"data.valid={other}")
    assert "resuming with other rows in data.valid" in caplog.text


def test_the_adapter_that_a_run_began_with_has_no_say_in_its_resume(finished, model, data, here, caplog):
    """The checkpoint has the weights: another adapter of the same shape changes nothing."""
    for name, seed in (("one", 1), ("two", 2)):
        train(model, data, here / name, "adapter.rank=2", "trainer.max_steps=1", f"trainer.seed={seed}")
    one, two = (f"adapter.init_from={here / name / 'adapter'}" for name in ("one", "two"))
    more = ["trainer.save_every=1", "trainer.keep=all", "optimizer.lr=1e-2", "trainer.max_steps=2"]
    train(model, data, here / "straight", *more, one)
    first = here / "straight" / "checkpoints" / "step-000001"
    train(model, data, here / "resumed", *more, two, f"trainer.resume={first}")
    assert metrics(here / "resumed") == metrics(here / "straight")
    assert "adapter.init_from has no effect" in caplog.text


def test_a_key_that_only_one_version_has_does_not_stand_in_the_way(run, finished, model, data):
    checkpoint = run / "checkpoints" / "step-000004"
    state = json.loads((checkpoint / "state.json").read_text())
    older = state["config"]
    del older["trainer"]["deterministic"], older["head"]
    older["trainer"]["dropped_since"] = 3
    resaved(checkpoint, config=older, counted_since=7)
    train(model, data, run, *STEPS, "trainer.max_steps=6", "trainer.resume=auto")
    assert metrics(run, "train") == metrics(finished, "train")


def test_a_base_model_that_changed_in_place_is_refused(model, data, here):
    own = shutil.copytree(model, here / "model")
    more = [*STEPS, "trainer.max_steps=2", "trainer.resume=auto"]
    train(own, data, here / "run", *STEPS, "trainer.max_steps=1")
    before = content(here / "run")
    make_model(own, "llama", seed=1, num_hidden_layers=2)
    with pytest.raises(InputError) as refusal:
        train(own, data, here / "run", *more)
    folder = (here / "run" / "checkpoints" / "step-000001").resolve()
    assert str(refusal.value) == (
        f"{folder} was trained on a model that has changed since: model.path={own} has other files now "
        f"(model.safetensors). Put them back, or start a new run from what it had learnt with "
        f"adapter.init_from={folder} adapter.any_base=true"
    )
    assert content(here / "run") == before
    from_there = (f"adapter.init_from={folder}", "adapter.any_base=true")
    train(own, data, here / "new", *STEPS, "trainer.max_steps=1", *from_there)
    shutil.copy(model / "model.safetensors", own)  # put back: another time, the same weights
    train(own, data, here / "run", *more)
    assert [line["step"] for line in metrics(here / "run")] == [1, 2]


def test_a_reference_that_changed_in_place_is_a_warning(model, here, caplog, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(here / "cache"))
    pair = {"prompt_ids": [5, 6], "chosen_ids": [7], "rejected_ids": [8]}
    data = write_rows(here / "pairs.jsonl", [pair] * 4)
    reference = make_model(here / "reference", "llama", seed=1, num_hidden_layers=2)
    more = [*STEPS, "trainer=dpo", f"loss.reference={reference}", "trainer.resume=auto"]
    train(model, data, here / "run", *more, "trainer.max_steps=1")
    train(model, data, here / "run", *more, "trainer.max_steps=2")
    assert "other files" not in caplog.text
    make_model(reference, "llama", seed=2, num_hidden_layers=2)
    train(model, data, here / "run", *more, "trainer.max_steps=3")
    words = f"resuming: loss.reference={reference} has other files now (model.safetensors); the run will"
    assert words in caplog.text


def test_a_base_model_with_another_configuration_is_refused(model, data, here):
    """The weights are the same; the positions are turned faster. How the file is written has no say."""
    own = shutil.copytree(model, here / "model")
    train(own, data, here / "run", *STEPS, "trainer.max_steps=1")
    config = json.loads((own / "config.json").read_text())
    (own / "config.json").write_text(json.dumps(config | {"rope_theta": 100.0}))
    more = [*STEPS, "trainer.max_steps=2", "trainer.resume=auto"]
    with pytest.raises(InputError, match=r"model.path=.* has other files now \(config.json\)"):
        train(own, data, here / "run", *more)
    (own / "config.json").write_text(json.dumps(config, indent=3))
    train(own, data, here / "run", *more)
    assert [line["step"] for line in metrics(here / "run")] == [1, 2]


def test_a_checkpoint_that_knows_weights_without_their_configuration_goes_on(run, finished, model, data):
    """As versions wrote it that looked at weights only."""
    weights = weight_digests(model)
    del weights["config.json"]
    resaved(run / "checkpoints" / "step-000004", weights={"model.path": weights})
    train(model, data, run, *STEPS, "trainer.max_steps=6", "trainer.resume=auto")
    assert metrics(run, "train") == metrics(finished, "train")


@pytest.fixture
def from_adapter(model, data, here, monkeypatch):
    """The keys of a dpo run of one step whose reference is the adapter in one/ that it began with."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(here / "cache"))
    for name, seed in (("one", 1), ("two", 2)):
        train(model, data, here / name, *STEPS, "trainer.max_steps=1", f"trainer.seed={seed}")
    pairs = [{"prompt_ids": [5, 6], "chosen_ids": [7], "rejected_ids": [8]}] * 4
    write_rows(here / "pairs.jsonl", pairs)
    keys = ["trainer=dpo", "loss.reference=start", "trainer.save_every=1"]
    train(model, "pairs.jsonl", "run", *keys, "adapter.init_from=one/adapter", "trainer.max_steps=1")
    return [*keys, "trainer.max_steps=2", "trainer.resume=auto"]


def test_a_start_that_is_the_reference_is_refused_when_its_files_have_changed(from_adapter, model, here):
    shutil.copytree("one/adapter", "kept")
    shutil.copy("two/adapter/adapters.safetensors", "one/adapter")
    before = content(here / "run")
    with pytest.raises(InputError, match="reference that would change: .*one.*adapters.safetensors"):
        train(model, "pairs.jsonl", "run", *from_adapter, "adapter.init_from=one/adapter")
    assert content(here / "run") == before
    shutil.copy("kept/adapters.safetensors", "one/adapter")
    train(model, "pairs.jsonl", "run", *from_adapter, "adapter.init_from=one/adapter")
    assert [line["step"] for line in metrics(here / "run")] == [1, 2]


def test_a_start_that_is_the_reference_goes_by_what_it_holds_whatever_it_is_called(
    from_adapter, model, here, caplog
):
    shutil.copytree("one/adapter", "kept")
    for other in ("two/adapter", "null"):
        with pytest.raises(InputError, match="reference that would change"):
            train(model, "pairs.jsonl", "run", *from_adapter, f"adapter.init_from={other}", "adapter.rank=2")
    train(model, "pairs.jsonl", "run", *from_adapter, "adapter.init_from=kept")
    assert "resuming with adapter.init_from" not in caplog.text and "as kept in" in caplog.text


def test_of_a_start_that_a_checkpoint_does_not_know_another_name_is_a_warning(from_adapter, model, caplog):
    """As versions wrote it that did not look at the adapter."""
    checkpoint = Path("run/checkpoints/step-000001")
    weights = json.loads((checkpoint / "state.json").read_text())["weights"]
    resaved(checkpoint, weights={"model.path": weights["model.path"]})
    train(model, "pairs.jsonl", "run", *from_adapter, "adapter.init_from=two/adapter")
    assert "another adapter.init_from: another reference, if it is not a copy" in caplog.text


def test_a_checkpoint_that_says_nothing_of_weights_goes_on(run, finished, model, data):
    """As versions wrote it that did not look at them."""
    checkpoint = run / "checkpoints" / "step-000004"
    state = json.loads((checkpoint / "state.json").read_text())
    assert state["weights"] == {"model.path": weight_digests(model)}
    resaved(checkpoint, weights={})
    train(model, data, run, *STEPS, "trainer.max_steps=6", "trainer.resume=auto")
    assert metrics(run, "train") == metrics(finished, "train")


def test_a_tuple_is_the_list_that_json_makes_of_it(model, data, here):
    plain = asdict(from_dict({"model.path": str(model), "data.train": str(data), "data.format": "tokens"}))
    tupled = json.loads(json.dumps(plain))
    tupled["optimizer"]["betas"] = (0.9, 0.999)
    assert same_training(settings(tupled, here), settings(plain, here))
    tupled["optimizer"]["betas"] = (0.9, 0.99)
    assert not same_training(settings(tupled, here), settings(plain, here))


def test_a_best_adapter_of_steps_that_are_taken_again_is_not_kept_for_that_of_another(
    run, finished, model, data
):
    """best/ as a kill leaves it: of a later step than the checkpoint that the run continues from."""
    assert json.loads((run / "best" / "best.json").read_text()) == {"step": 6}
    train(model, data, run, *STEPS, "trainer.max_steps=5", "trainer.resume=auto")
    assert json.loads((run / "best" / "best.json").read_text()) == {"step": 4}
    assert same(arrays(run / "best"), arrays(run / "checkpoints" / "step-000004"))


def test_a_best_adapter_that_is_gone_is_a_warning(run, model, data, caplog):
    shutil.rmtree(run / "checkpoints" / "step-000003")
    resaved(run / "checkpoints" / "step-000004", best_step=3)
    train(model, data, run, *STEPS, "trainer.max_steps=5", "trainer.resume=auto")
    assert "the adapter of step 3, the best so far, is gone" in caplog.text
    assert not (run / "best").exists()


def test_rows_are_compared_by_tokens_masks_and_order(model, here):
    rows = [
        {"input_ids": [5, 6, 7], "completion_mask": [0, 1, 1]},
        {"input_ids": [8, 9], "completion_mask": [0, 1]},
    ]
    data = write_rows(here / "rows.jsonl", rows)
    train(model, data, here / "run", *STEPS, "trainer.max_steps=1")
    again = ["trainer.max_steps=2", "trainer.resume=auto"]
    masked = [{"input_ids": [5, 6, 7], "completion_mask": [0, 0, 1]}, rows[1]]
    for other in (rows[::-1], masked, rows[:1], [*rows, rows[0]]):
        write_rows(data, other)
        with pytest.raises(InputError, match="was trained on rows with other tokens"):
            train(model, data, here / "run", *STEPS, *again)
    write_rows(data, [{"notes": 1, **row} for row in rows])
    train(model, data, here / "run", *STEPS, *again)
