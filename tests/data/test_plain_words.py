"""Answers found without rendering again are where rendering again finds them."""

import random

import pytest

from mlxft.data.answers import _find_words, plain_words
from mlxft.data.chat import ChatEncoder
from mlxft.data.formats import ChatRow
from mlxft.data.template import ChatTemplate, Refused
from tests.data.conftest import TEMPLATES

WORDS = [
    "hello", "Yes.", "  spaced  ", "two\nlines\n", "<|im_end|>", "<think>", "</think>", "né", "🪨", "a",
    "\n", "Me: ", "user", "assistant\n", "<|im_start|>user\n", "{{ x }}", "{'role': 'user'}",
]  # fmt: skip


def conversations(number):
    random_ = random.Random(7)
    for _ in range(number):
        turns = [{"role": "system", "content": "Be brief."}] if random_.random() < 0.3 else []
        for _ in range(random_.randint(1, 3)):
            for role in ("user", "assistant"):
                content = "".join(random_.choices(WORDS, k=random_.randint(1, 4)))
                turns.append({"role": role, "content": content if content.strip() else "x"})
        yield ChatRow(turns, None, 0, "rows.jsonl:1")


@pytest.mark.parametrize("name", TEMPLATES)
def test_words_are_where_another_rendering_finds_them(make_tokenizer, name):
    template = ChatTemplate(make_tokenizer(name))
    found = 0
    for row in conversations(60):
        try:
            text = template.render(row.messages, row.tools)
        except Refused:
            continue
        words = plain_words(template, row, text)
        for turn, each in enumerate(words or ()):
            if row.messages[turn]["role"] == "assistant":
                assert each == _find_words(template, row, text, turn), (row.messages, turn)
                found += 1
    assert found > 20 or name not in ("chatml", "headers", "default_system", "words")


@pytest.mark.parametrize("name", TEMPLATES)
def test_tokens_and_masks_are_the_same_either_way(make_tokenizer, name, monkeypatch):
    rows = list(conversations(40))
    quick = ChatEncoder(make_tokenizer(name)).encode_all(rows, "assistant")
    monkeypatch.setattr("mlxft.data.answers.plain_words", lambda *_: None)
    slow = ChatEncoder(make_tokenizer(name)).encode_all(rows, "assistant")
    for one, other in zip(quick, slow, strict=True):
        if isinstance(one, Exception):
            assert str(one) == str(other)
        else:
            assert one.tokens.tolist() == other.tokens.tolist()
            assert one.mask.tolist() == other.mask.tolist()
            assert one.num_unended == other.num_unended
