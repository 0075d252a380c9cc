"""The reference of dpo and kto: what its log-probabilities are kept by, and which tokens it can read."""

import json
import math
import os
import shutil

import pytest

from mlxft.errors import InputError
from mlxft.training.objectives.preference import Dpo
from mlxft.training.reference_files import is_start
from tests.runs import metrics, train, write_rows
from tests.tiny_models import make_model

PAIRS = [{"prompt_ids": [5, 6, n], "chosen_ids": [7, n], "rejected_ids": [8]} for n in (9, 10, 11, 12)]
LABELLED = [{"prompt_ids": [5, 6, n], "completion_ids": [7], "label": n % 2 == 0} for n in (9, 10, 11, 12)]
ROWS = {"dpo": PAIRS, "kto": LABELLED}


@pytest.fixture(autouse=True)
def cache(here, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(here / "cache"))


@pytest.fixture
def is_kept(model, here, caplog):
    """Trains one step of an objective and tells whether the reference was scored before."""
    number = 0

    def run(objective, *overrides, model=model, rows=None) -> bool:
        nonlocal number
        number += 1
        data = write_rows(here / "rows.jsonl", rows or ROWS[objective])
        caplog.clear()
        train(model, data, here / f"run{number}", f"trainer={objective}", "trainer.max_steps=1", *overrides)
        kept, scored = ("as kept in" in caplog.text, "being computed once" in caplog.text)
        assert kept != scored
        return kept

    return run


def dated(folder):
    """Sets every file of the folder to one time, as an unpacked archive has it."""
    for file in folder.rglob("*"):
        os.utime(file, (1, 1))
    return folder


@pytest.mark.parametrize("objective", ["dpo", "kto"])
def test_another_model_in_the_place_of_the_first_is_scored_though_sizes_and_times_are_the_same(
    objective, is_kept, here
):
    reference = here / "reference"
    more = [objective, f"loss.reference={reference}"]
    dated(make_model(reference, "llama", seed=1, num_hidden_layers=1))
    assert not is_kept(*more)
    sizes = [file.stat().st_size for file in sorted(reference.iterdir())]
    shutil.rmtree(reference)
    dated(make_model(reference, "llama", seed=2, num_hidden_layers=1))
    assert [file.stat().st_size for file in sorted(reference.iterdir())] == sizes
    assert not is_kept(*more)
    make_model(reference, "llama", seed=1, num_hidden_layers=1)
    assert is_kept(*more)  # the first one's are still there, whatever the time of its files


def test_a_model_with_another_configuration_is_scored_anew(is_kept, model, here):
    own = dated(shutil.copytree(model, here / "own"))
    assert not is_kept("dpo", model=own)
    config = json.loads((own / "config.json").read_text())
    (own / "config.json").write_text(json.dumps(config | {"rope_theta": 20000.0}))
    dated(own)
    assert not is_kept("dpo", model=own)
    assert is_kept("dpo")  # the model that `own` is a copy of


def test_an_adapter_that_changed_where_it_lies_is_scored_anew(is_kept, model, data, here):
    for name, seed in (("one", 1), ("two", 2)):
        train(model, data, here / name, "adapter.rank=2", "trainer.max_steps=1", f"trainer.seed={seed}")
    adapter = here / "one" / "adapter"
    more = ["dpo", "loss.reference=start", f"adapter.init_from={adapter}"]
    dated(adapter)
    assert not is_kept(*more) and is_kept(*more)
    shutil.copy(here / "two" / "adapter" / "adapters.safetensors", adapter)
    dated(adapter)
    assert not is_kept(*more)


def test_an_adapter_in_the_home_folder_counts_too(is_kept, model, data, here, monkeypatch):
    monkeypatch.setenv("HOME", str(here))
    train(model, data, here / "one", "adapter.rank=2", "trainer.max_steps=1", "optimizer.lr=1e-2")
    more = ["dpo", "loss.reference=start", 'adapter.init_from="~/one/adapter"']
    assert not is_kept(*more)
    shutil.rmtree(here / "one")
    train(model, data, here / "one", "adapter.rank=2", "trainer.max_steps=1", "optimizer.lr=1e-3")
    assert not is_kept(*more)


def test_what_rounds_otherwise_is_scored_anew_and_what_only_trains_otherwise_is_not(is_kept):
    assert not is_kept("dpo")
    for rounds_otherwise in (
        "head.kind=full",
        "head.kind=chunked",
        "head.chunk=2",
        "data.batch_size=2",
        "trainer.layout=packed",
        "model.dtype=bfloat16",
    ):
        assert not is_kept("dpo", rounds_otherwise), rounds_otherwise
    for trains_otherwise in ("loss.beta=0.5", "optimizer.lr=1e-3", "trainer.accumulate=2", "trainer.seed=1"):
        assert is_kept("dpo", trains_otherwise), trains_otherwise


# ---- tokens ----


def with_other_tokens(folder, swapped=("a", "b")):
    """Exchanges the ids of two tokens in the tokenizer of a model's folder."""
    file = folder / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    vocabulary, (one, other) = tokenizer["model"]["vocab"], swapped
    vocabulary[one], vocabulary[other] = vocabulary[other], vocabulary[one]
    file.write_text(json.dumps(tokenizer))
    return folder


def ids(text: str) -> list[int]:
    return [byte + 3 for byte in text.encode()]  # as the tiny models' tokenizer has them


WITH_A = [{"prompt_ids": ids("say"), "chosen_ids": ids("x"), "rejected_ids": ids("y")}] * 4
WITHOUT_A = [{"prompt_ids": ids("tell"), "chosen_ids": ids("x"), "rejected_ids": ids("y")}] * 4


def test_a_reference_with_another_tokenizer_is_refused_before_models_are_read(model, here, caplog):
    reference = with_other_tokens(shutil.copytree(model, here / "reference"))
    rows = [{"prompt": "say", "chosen": "x", "rejected": "y"}] * 4
    data = write_rows(here / "rows.jsonl", rows)
    more = ["trainer=dpo", "data.format=preference", f"loss.reference={reference}"]
    with pytest.raises(InputError, match="name a reference with the tokenizer") as refusal:
        train(model, data, here / "run", *more)
    words = "rows.jsonl:1: token 100 is 'a' to the model that is trained and 'b' to loss.reference"
    assert words in str(refusal.value)
    assert "in memory" not in caplog.text and not (here / "run").exists()


def test_rows_of_tokens_are_looked_at_where_both_models_have_a_tokenizer(is_kept, model, here):
    reference = with_other_tokens(shutil.copytree(model, here / "reference"))
    named = f"loss.reference={reference}"
    with pytest.raises(InputError, match="rows.jsonl:1: token 100 is 'a' to the model .* and 'b' to"):
        is_kept("dpo", named, rows=WITH_A)
    labelled = {"prompt_ids": ids("tell"), "completion_ids": ids("b"), "label": True}
    with pytest.raises(InputError, match="rows.jsonl:2: token 101 is 'b' to the model .* and 'a' to"):
        is_kept("kto", named, rows=[labelled | {"completion_ids": ids("x")}, labelled])
    (reference / "tokenizer.json").unlink()
    (reference / "tokenizer_config.json").unlink()
    assert not is_kept("dpo", named, rows=WITH_A)


def test_a_reference_that_names_only_tokens_otherwise_that_no_row_has_is_taken(is_kept, model, here):
    """As a tuned model does that gave spare ids names of its own."""
    reference = with_other_tokens(shutil.copytree(model, here / "reference"))
    assert not is_kept("dpo", f"loss.reference={reference}", rows=WITHOUT_A)


@pytest.mark.parametrize(
    "objective, reference, adapter, is_so",
    [
        ("dpo", "start", "lora", True),
        ("kto", "base", "full", True),  # there is no adapter to switch off
        ("dpo", "base", "lora", False),
        ("dpo", "folder", "full", False),
        ("sft", "base", "full", False),  # which has no reference
    ],
)
def test_the_reference_is_the_start_where_that_is_asked_for_or_all_there_is(
    objective, reference, adapter, is_so
):
    assert is_start(objective, reference, adapter) == is_so


def test_a_run_stopped_while_the_reference_scores_goes_on_where_it_was(model, here, monkeypatch, caplog):
    rows = [{"prompt_ids": [5, 6], "chosen_ids": [7 + n, 2], "rejected_ids": [9, 2]} for n in range(6)]
    data = write_rows(here / "rows.jsonl", rows)
    chosen = ["trainer=dpo", "trainer.max_steps=1", "data.batch_size=2"]
    score, scored = Dpo.reference_logps, []

    def stopping(self, view, batch):
        if len(scored) == 2:
            raise KeyboardInterrupt
        scored.append(len(batch))
        return score(self, view, batch)

    monkeypatch.setattr(Dpo, "reference_logps", stopping)
    with pytest.raises(KeyboardInterrupt):
        train(model, data, here / "first", *chosen)
    monkeypatch.setattr(Dpo, "reference_logps", lambda *a: scored.append(len(a[2])) or score(*a))
    train(model, data, here / "second", *chosen)
    assert "of 6 rows: being computed once, 4 of them before" in caplog.text
    assert scored == [2, 2, 2]
    monkeypatch.setattr(Dpo, "reference_logps", score)
    shutil.rmtree(here / "cache")
    train(model, data, here / "whole", *chosen)
    lines = [(here / name / "metrics.jsonl").read_text().splitlines()[0] for name in ("second", "whole")]
    assert [json.loads(line)["loss"] for line in lines] == [json.loads(lines[0])["loss"]] * 2


def test_a_run_that_sees_few_rows_is_told_that_all_are_scored(model, here, caplog):
    rows = [{"prompt_ids": [5], "chosen_ids": [7, 2], "rejected_ids": [9, 2]}] * 9
    data = write_rows(here / "rows.jsonl", rows)
    train(model, data, here / "run", "trainer=dpo", "trainer.max_steps=2", "data.batch_size=2")
    assert "this run sees 4 of them: loss.reference_scored=every_step" in caplog.text


@pytest.mark.parametrize("unfinished", [False, True])
@pytest.mark.parametrize(
    "damage",
    [
        lambda content: content[:40] + bytes([content[40] ^ 1]) + content[41:],
        lambda content: content[:-1],
        lambda content: bytes(len(content)),
        lambda content: b"",
    ],
    ids=["a bit", "the end", "zeros", "all"],
)
def test_what_was_kept_and_is_damaged_is_computed_anew(is_kept, here, damage, unfinished, caplog):
    assert not is_kept("dpo")
    (file,) = (here / "cache" / "mlxft" / "reference").iterdir()
    content = file.read_bytes()
    if unfinished:
        file.unlink()
        file = file.with_suffix(f".unfinished{file.suffix}")
    file.write_bytes(damage(content))
    assert not is_kept("dpo") and "are damaged, and computed anew" in caplog.text
    assert metrics(here / "run2")[0]["loss"] == pytest.approx(math.log(2))  # the policy is the reference yet
    assert is_kept("dpo")


def test_a_place_where_nothing_can_be_kept_does_not_stop_a_run(is_kept, here, monkeypatch, caplog):
    (here / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(here / "file" / "cache"))
    assert not is_kept("dpo") and "are not kept for later" in caplog.text
