"""The recipes that come with mlxft: each composes, names its cost and does what it says."""

import json

import pytest

from mlxft.backend import backend
from mlxft.config import compose
from mlxft.config.recipes import description, find_recipes
from mlxft.config.schema import DataConfig
from mlxft.data.load import load_examples, load_pairs
from mlxft.evaluation.generate import prompt_tokens
from mlxft.models.load import load_tokenizer, vocabulary_size
from mlxft.resources import bundled_data, folder
from tests.command import mlxft

OWN = {
    name: recipe
    for name, recipe in find_recipes().items()
    if recipe.path.resolve().parent == folder("recipes")
}
BUNDLED = ("pebble.jsonl", "pebble_valid.jsonl")
PREFERENCE = ("orpo", "dpo", "simpo", "kto")


def conversations(name):
    return [
        json.loads(line)["messages"] for line in bundled_data(name).read_text(encoding="utf-8").splitlines()
    ]


@pytest.mark.parametrize("name", OWN)
def test_a_recipe_composes_for_every_command_that_takes_it(name):
    assert compose([f"+recipe={name}"]).recipe == name
    assert compose([f"+recipe={name}"], command="eval").config.model.path
    assert compose([f"+recipe={name}", "prompt=hello"], command="generate").own.prompt == "hello"


@pytest.mark.parametrize("name", OWN)
def test_a_recipe_says_what_it_shows_and_what_it_costs(name):
    text = description(OWN[name])
    assert len(text) > 40
    assert "Measured" in text and ("minute" in text or "second" in text)


@pytest.mark.parametrize("name", BUNDLED)
def test_bundled_rows_are_short_and_train_the_answer_with_its_end(name, smollm2):
    tokenizer = load_tokenizer(smollm2)
    rows, report = load_examples(f"bundled:{name}", DataConfig(), tokenizer, vocabulary_size(smollm2))
    said = conversations(name)
    assert report.num_examples == report.num_rows == len(said)
    for row, messages in zip(rows, said, strict=True):
        assert 20 <= len(row.tokens) <= 60, row.where
        assert tokenizer.decode(row.tokens[row.mask].tolist()) == messages[-1]["content"] + "<|im_end|>", (
            row.where
        )


def test_generate_asks_with_the_tokens_that_training_saw(smollm2):
    tokenizer = load_tokenizer(smollm2)
    rows, _ = load_examples(f"bundled:{BUNDLED[0]}", DataConfig(), tokenizer, vocabulary_size(smollm2))
    for row, messages in zip(rows, conversations(BUNDLED[0]), strict=True):
        system = messages[0]["content"] if messages[0]["role"] == "system" else None
        asked = prompt_tokens(tokenizer, messages[-2]["content"], system)
        assert row.tokens[: row.mask.argmax()].tolist() == asked, row.where


@pytest.mark.parametrize("name", ["shout.jsonl", "shout_valid.jsonl"])
def test_bundled_pairs_differ_in_capitals_and_nothing_else(name, smollm2):
    tokenizer = load_tokenizer(smollm2)
    pairs, report = load_pairs(f"bundled:{name}", DataConfig(), tokenizer, vocabulary_size(smollm2))
    assert report.num_examples == report.num_rows and report.num_identical == 0
    for pair in pairs:
        chosen, rejected = (
            tokenizer.decode(answer[mask].tolist()).removesuffix("<|im_end|>")
            for answer, mask in ((pair.chosen, pair.chosen_mask), (pair.rejected, pair.rejected_mask))
        )
        assert chosen == rejected.upper() != rejected, pair.where


def test_held_out_pairs_ask_what_no_other_row_asks():
    def questions(name):
        rows = bundled_data(name).read_text(encoding="utf-8").splitlines()
        return {json.loads(row)["prompt"][0]["content"] for row in rows}

    held_out = questions("shout_valid.jsonl")
    assert len(held_out) == 24
    assert not held_out & (questions("shout.jsonl") | questions("shout_unpaired.jsonl"))
    assert held_out == questions("shout_unpaired_valid.jsonl")


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_quickstart_teaches_the_name_and_keeps_paris(seed, trained, tmp_path):
    run = trained("quickstart", f"trainer.seed={seed}")
    samples = json.loads((run / "summary.json").read_text())["samples"]
    before, after = (
        {each["question"]: each["answer"] for each in samples[when]} for when in ("before", "after")
    )
    assert "Pebble" not in before["Who are you?"]
    assert "Pebble" in after["Who are you?"] and "mlxft project" in after["Who are you?"]
    assert after["What is the capital of France?"] == "The capital of France is Paris."
    asked = mlxft(
        "generate", "+recipe=quickstart", f"adapter.init_from={run / 'adapter'}", "prompt=Who made you?",
        folder=tmp_path,
    )  # fmt: skip
    assert "mlxft project" in asked.stdout


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", PREFERENCE)
def test_a_preference_recipe_prefers_capitals_on_held_out_rows(name, trained, evaluated):
    run = trained(name)
    pairs, adapter = "data.valid=bundled:shout_valid.jsonl", f"adapter.init_from={run / 'adapter'}"
    before, after = evaluated(name, pairs), evaluated(name, pairs, adapter)
    assert before["accuracy"] < 0.2 and before["margin"] < 0
    assert after["accuracy"] == 1.0 and after["margin"] > 0
    own = evaluated(name, adapter)  # of kto, labelled answers
    assert own["accuracy"] == 1.0 and own["margin"] > 0
    last = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
    assert last["kind"] == "valid" and last["rewards/accuracies"] == pytest.approx(1.0)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_packed_recipe_learns_the_quickstarts_rows_and_pads_nothing(trained, smollm2):
    rows, _ = load_examples(
        "bundled:pebble.jsonl", DataConfig(), load_tokenizer(smollm2), vocabulary_size(smollm2)
    )
    run = trained("packed_sft")
    steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert steps[-1]["kind"] == "valid" and steps[-1]["loss"] < 1.0
    if backend() == "cpu":  # elsewhere lengths are rounded up
        positions = sum(step["positions"] for step in steps if step["kind"] == "train")
        assert positions == 2 * sum(len(row.tokens) - 1 for row in rows)
