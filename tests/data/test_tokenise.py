"""Many texts at once: the tokens and their characters are those the tokenizer itself gives."""

import numpy as np
import pytest
from tokenizers import normalizers

from mlxft.data.tokenise import Tokeniser
from tests.data.conftest import build

TEXTS = [
    "hello there",
    "",
    " ",
    "\n\n  two  spaces\tand a tab\r\n",
    "<|im_start|>user\nWhat is the sea?<|im_end|>\n",
    "né, 🪨🪨, 日本語, and \u2028 between",
    "e\u0301 is not é",
    "<|wide|>   white space that a token takes in",
    "<think>hm</think> 12345 don't",
]

TOKENIZERS = {
    "plain": {},
    "adds BOS and EOS": {"adds_bos": True, "adds_eos": True},
    "drops a character": {"drops": "a"},
    "trims white space": {"trims": True},
}


@pytest.mark.parametrize("kind", TOKENIZERS)
@pytest.mark.parametrize("special", [True, False])
def test_tokens_and_characters_are_the_tokenizers_own(make_tokenizer, kind, special):
    tokenizer = make_tokenizer(**TOKENIZERS[kind])
    made = Tokeniser(tokenizer)(TEXTS, special=special, offsets=True)
    for text, tokens in zip(TEXTS, made, strict=True):
        expected = tokenizer(text, add_special_tokens=special, return_offsets_mapping=True)
        assert tokens.ids.tolist() == expected["input_ids"], text
        assert tokens.offsets.tolist() == [list(pair) for pair in expected["offset_mapping"]], text
        assert tokens.ids.dtype == np.int32


def test_a_normal_form_is_counted_only_where_it_changes_nothing():
    tokenizer = build()
    tokenizer.backend_tokenizer.normalizer = normalizers.NFC()
    made = Tokeniser(tokenizer)(TEXTS, special=False, offsets=True)
    for text, tokens in zip(TEXTS, made, strict=True):
        expected = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        assert tokens.ids.tolist() == expected["input_ids"], text
        assert tokens.offsets.tolist() == [list(pair) for pair in expected["offset_mapping"]], text


def test_truncation_and_padding_that_were_left_on_change_nothing():
    tokenizer = build()
    tokenizer.backend_tokenizer.enable_truncation(2)
    tokenizer.backend_tokenizer.enable_padding(length=50)
    [tokens] = Tokeniser(tokenizer)(["hello there, and hello again"], special=False, offsets=False)
    assert tokens.ids.tolist() == tokenizer("hello there, and hello again")["input_ids"]


def test_a_tokenizer_that_does_more_than_its_backend_is_called_itself():
    from transformers import ByT5Tokenizer

    tokenizer = ByT5Tokenizer()
    made = Tokeniser(tokenizer)(["né", "a"], special=True, offsets=True)
    assert [tokens.ids.tolist() for tokens in made] == [tokenizer(text)["input_ids"] for text in ("né", "a")]
    assert [tokens.offsets for tokens in made] == [None, None]
