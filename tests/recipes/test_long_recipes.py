"""The recipes with long rows: their answers stand far before the questions, and they learn to find them."""

import json
import re
import subprocess
import sys

import pytest

from mlxft.config import compose
from mlxft.config.schema import DataConfig
from mlxft.data.load import load_examples, load_pairs
from mlxft.models.load import load_tokenizer, vocabulary_size
from mlxft.resources import bundled_data
from tests.command import mlxft
from tests.tiny_models import make_model

CHAPTERS = ("harbour.jsonl", "harbour_valid.jsonl")
PAIRS = ("harbour_pairs.jsonl", "harbour_pairs_valid.jsonl")
ENTRY = re.compile(r"^(Correction\. )?Berth (\d+): the (.+), master (.+), carrying (.+)\.$", re.MULTILINE)


def rows_of(name):
    return [json.loads(line) for line in bundled_data(name).read_text(encoding="utf-8").splitlines()]


def examples_of(names, folder, **data):
    tokenizer, vocabulary = load_tokenizer(folder), vocabulary_size(folder)
    config = DataConfig(**data)
    return [
        row for name in names for row in load_examples(f"bundled:{name}", config, tokenizer, vocabulary)[0]
    ]


def test_the_harbours_files_are_what_their_script_writes(tmp_path):
    script = bundled_data("harbour.py")
    subprocess.run([sys.executable, str(script), str(tmp_path)], check=True, timeout=60)
    for name in CHAPTERS + PAIRS:
        assert (tmp_path / name).read_bytes() == bundled_data(name).read_bytes(), name


@pytest.mark.parametrize("name", CHAPTERS)
def test_a_chapters_answers_stand_in_the_register_and_nowhere_else(name):
    for row in rows_of(name):
        text, *later = [each["content"] for each in row["messages"]]
        register, _, month = text.partition("\n\nDay 1. ")
        entries = {berth: (ship, cargo) for _, berth, ship, _, cargo in ENTRY.findall(register)}
        assert len(entries) == 12
        assert not any(ship in month for ship, _ in entries.values())
        questions, answers = [month.rpartition("\n\n")[2], *later[1::2]], later[::2]
        asked = [re.fullmatch(r"Which ship lies at berth (\d+)\?", question)[1] for question in questions]
        assert sorted(asked) == sorted(entries)
        assert answers == ["The {}, with {}.".format(*entries[berth]) for berth in asked]


@pytest.mark.parametrize("name", PAIRS)
def test_the_chosen_answer_is_as_corrected_and_the_rejected_one_as_it_was(name):
    for row in rows_of(name):
        prompt = row["prompt"][0]["content"]
        asked = re.search(r"What is known of berth (\d+)\?$", prompt)[1]
        entries = [entry for entry in ENTRY.findall(prompt) if entry[1] == asked]
        assert [bool(corrected) for corrected, *_ in entries] == [False, True]
        before, after = (
            "It is kept for the {2}, whose master is {3} and which carries {4}.".format(*entry)
            for entry in entries
        )
        assert row["chosen"][0]["content"] == after != before == row["rejected"][0]["content"]


def test_the_document_is_long_and_its_answers_are_far_from_what_they_ask(smollm2):
    positions = json.loads((smollm2 / "config.json").read_text())["max_position_embeddings"]
    limit = compose(["+recipe=long_context"]).config.data.max_length
    rows = examples_of(CHAPTERS, smollm2, max_length=positions)
    assert sum(len(row.tokens) for row in rows) > 16_384
    assert 3500 < min(len(row.tokens) for row in rows)
    assert max(len(row.tokens) for row in rows) <= limit < positions
    tokenizer = load_tokenizer(smollm2)
    for row in rows:
        text = tokenizer.decode(row.tokens[: row.mask.argmax()].tolist())
        behind = text.partition("\n\nDay 1. ")[2]
        assert len(tokenizer.encode(behind)) > 2700  # tokens between the register and the first answer


def test_rows_of_1024_tokens_have_lost_the_register_and_no_answer(smollm2):
    tokenizer = load_tokenizer(smollm2)
    whole = examples_of(CHAPTERS, smollm2, max_length=4096)
    for row, cut in zip(whole, examples_of(CHAPTERS, smollm2, max_length=1024), strict=True):
        assert (cut.tokens[cut.mask] == row.tokens[row.mask]).all()
        assert "master" not in tokenizer.decode(cut.tokens.tolist())


def test_the_long_pairs_have_prompts_of_more_than_1000_tokens(smollm2):
    tokenizer, vocabulary = load_tokenizer(smollm2), vocabulary_size(smollm2)
    for name in PAIRS:
        pairs, report = load_pairs(f"bundled:{name}", DataConfig(), tokenizer, vocabulary)
        assert report.num_examples == report.num_rows and report.num_identical == 0
        assert all(1000 < len(pair.prompt) < 1500 for pair in pairs)


@pytest.mark.parametrize(("name", "layout"), [("long_context", "padded"), ("orpo_long", "prefix_shared")])
def test_the_first_step_of_a_long_recipe_runs_in_segments(name, layout, tmp_path):
    model = make_model(tmp_path / "model", "llama", num_hidden_layers=16, max_position_embeddings=2048)
    run = tmp_path / "run"
    shorter = ("data.max_length=1280", "trainer.max_steps=1", "data.valid=null")
    done = mlxft(
        "train", f"+recipe={name}", f"model.path={model}", *shorter, f"run.dir={run}", folder=tmp_path
    )
    assert done.returncode == 0, done.stderr
    said = done.stdout + done.stderr
    assert "gradient: segmented" in said and f"layout: {layout}" in said
    step = json.loads((run / "metrics.jsonl").read_text())
    assert step["step"] == 1 and 1024 < step["positions"] < 1500 and step["loss"] > 0


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_the_long_context_recipe_answers_from_the_beginning_of_its_rows(trained, evaluated):
    adapter = f"adapter.init_from={trained('long_context', timeout=5400) / 'adapter'}"
    before, after = evaluated("long_context"), evaluated("long_context", adapter)
    without = evaluated("long_context", adapter, "data.max_length=1024")
    assert before["tokens"] == after["tokens"] == without["tokens"]
    assert after["loss"] < 0.5 * before["loss"]
    assert without["loss"] > 2 * after["loss"]


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_the_long_orpo_recipe_prefers_what_was_corrected(trained, evaluated):
    adapter = f"adapter.init_from={trained('orpo_long', timeout=5400) / 'adapter'}"
    before, after = evaluated("orpo_long"), evaluated("orpo_long", adapter)
    assert before["accuracy"] < 0.5 and before["margin"] < 0
    assert after["accuracy"] >= 0.9 and after["margin"] > 0
