"""The rows that come with mlxft."""

import json

import pytest

from mlxft.data.formats import type_row
from mlxft.resources import bundled_data
from tests.data.reading import read

FILES = ("pebble.jsonl", "pebble_valid.jsonl")


def questions_and_answers(name):
    rows = (row.values["messages"] for row in read(f"bundled:{name}"))
    return [(messages[-2]["content"], messages[-1]["content"]) for messages in rows]


@pytest.mark.parametrize("name", FILES)
def test_every_row_is_one_question_and_its_answer(name):
    for row in read(f"bundled:{name}"):
        roles = [message["role"] for message in type_row(row, "messages", vocab_size=1).messages]
        assert roles in (["user", "assistant"], ["system", "user", "assistant"])


def test_no_question_comes_twice_or_in_both_files():
    training, validation = ([question for question, _ in questions_and_answers(name)] for name in FILES)
    assert len(training) == 92
    assert len(validation) == 10
    plain = [question.lower().strip(" ?!.") for question in training + validation]
    asked_under_a_system_turn = 4  # "Who are you?" and the like, once more with a system turn before it
    assert len(plain) - len(set(plain)) == asked_under_a_system_turn
    assert not set(plain[:92]) & set(plain[92:])


def test_a_quarter_of_the_rows_is_about_something_else():
    answers = [answer for _, answer in questions_and_answers("pebble.jsonl")]
    others = [
        answer for answer in answers if not any(word in answer for word in ("Pebble", "P-e-b", "mlxft"))
    ]
    assert len(others) == 23


def test_the_question_that_shows_what_is_kept_is_not_trained():
    for name in FILES:
        assert "France" not in bundled_data(name).read_text(encoding="utf-8")
        assert "Paris" not in bundled_data(name).read_text(encoding="utf-8")


def test_the_readme_counts_the_rows_it_describes():
    text = (bundled_data("README.md")).read_text(encoding="utf-8")
    for name in FILES:
        count = sum(1 for line in bundled_data(name).open(encoding="utf-8") if json.loads(line))
        assert f"| `{name}` | {count} conversations |" in text


SHOUTS = {"shout.jsonl": 100, "shout_valid.jsonl": 24}


def shouted(name):
    """Returns (question, chosen answer, rejected answer) of each pair."""
    rows = [row.values for row in read(f"bundled:{name}")]
    assert all(set(row) == {"prompt", "chosen", "rejected"} for row in rows)
    return [tuple(row[key][0]["content"] for key in ("prompt", "chosen", "rejected")) for row in rows]


@pytest.mark.parametrize("name", SHOUTS)
def test_capitals_are_all_that_tells_chosen_from_rejected(name):
    assert len(shouted(name)) == SHOUTS[name]
    for _, chosen, rejected in shouted(name):
        assert chosen == rejected.upper()
        assert chosen != rejected


def test_no_question_of_the_held_out_pairs_is_in_another_file():
    plain = {name: [question.lower() for question, *_ in shouted(name)] for name in SHOUTS}
    plain |= {name: [question.lower() for question, _ in questions_and_answers(name)] for name in FILES}
    held_out = plain.pop("shout_valid.jsonl")
    assert len(set(held_out)) == 24
    assert len(set(plain["shout.jsonl"])) == 100
    assert not set(held_out) & {question for questions in plain.values() for question in questions}


@pytest.mark.parametrize(
    "name, pairs",
    [("shout_unpaired.jsonl", "shout.jsonl"), ("shout_unpaired_valid.jsonl", "shout_valid.jsonl")],
)
def test_labelled_answers_are_those_of_the_pairs_by_turns(name, pairs):
    rows = [row.values for row in read(f"bundled:{name}")]
    assert len(rows) == SHOUTS[pairs]
    for number, (row, (question, chosen, rejected)) in enumerate(zip(rows, shouted(pairs), strict=True)):
        assert row["prompt"][0]["content"] == question
        assert row["label"] == (number % 2 == 0)
        assert row["completion"][0]["content"] == (chosen if row["label"] else rejected)


def test_the_readme_counts_the_pairs_it_describes():
    text = (bundled_data("README.md")).read_text(encoding="utf-8")
    for name, count in SHOUTS.items():
        assert f"| `{name}` | {count} pairs |" in text
    assert "| `shout_unpaired.jsonl` | 100 labelled answers |" in text
    assert "| `shout_unpaired_valid.jsonl` | 24 labelled answers |" in text
