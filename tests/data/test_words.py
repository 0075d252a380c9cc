"""Words remembered: the tokens are the library's for every pattern that is known; others are not tried."""

import random

import pytest
from tokenizers import AddedToken, Regex, normalizers, pre_tokenizers

from mlxft.data.tokenise import Tokeniser
from tests.data.conftest import build

CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
LLAMA_3 = CONTRACTIONS + (
    r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN = LLAMA_3.replace(r"\p{N}{1,3}", r"\p{N}")
BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
GPT_2 = pre_tokenizers.ByteLevel(add_prefix_space=False)

KNOWN = {
    "GPT-2": GPT_2,
    "SmolLM2": pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), GPT_2]),
    "digits together": pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=False), GPT_2]),
    "Llama 3": pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(LLAMA_3), "isolated"), BYTES]),
    "Qwen": pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(QWEN), "isolated"), BYTES]),
    "two splits with gaps": pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\p{N}{1,3}"), "isolated"),
            pre_tokenizers.Split(Regex(r"[A-Za-z]+|\s+"), "isolated"),
            BYTES,
        ]
    ),
}
UNKNOWN = {
    "a space put before": pre_tokenizers.ByteLevel(add_prefix_space=True),
    "what matches is removed": pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(" "), "removed"), BYTES]),
    "properties that re has not": pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(r"\p{Lu}+|\p{Ll}+"), "isolated"), BYTES]
    ),
    "white space": pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), BYTES]),
}


def tokenizer_with(pre_tokenizer, **options):
    tokenizer = build(**options)
    # What <|wide|> swallows depends on the text around it; without it the words stand for themselves.
    backend = tokenizer.backend_tokenizer
    state = backend.to_str().replace('"rstrip":true', '"rstrip":false')
    tokenizer._tokenizer = type(backend).from_str(state)
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizer
    return tokenizer


def texts(tokenizer, number):
    random_ = random.Random(3)
    added = list(tokenizer.get_added_vocab())
    bits = ["'s", "'LL", "don't ", " 12", "   ", "\r\n", "\t", "the name"]
    bits += [*added, *(text[:-1] for text in added)]
    for _ in range(number):
        characters = [chr(random_.randrange(128)) for _ in range(6)]
        yield "".join(random_.choices(bits + characters, k=random_.randint(0, 30)))


@pytest.mark.parametrize("name", KNOWN)
def test_tokens_of_ascii_texts_are_the_librarys(name):
    tokenizer = tokenizer_with(KNOWN[name])
    tokeniser, made = Tokeniser(tokenizer), list(texts(tokenizer, 400))
    assert tokeniser._words is not None
    for _ in range(2):  # seen for the first time, and remembered
        for text, tokens in zip(made, tokeniser(made, special=False, offsets=True), strict=True):
            expected = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
            assert tokens.ids.tolist() == expected["input_ids"], repr(text)
            assert tokens.offsets.tolist() == [list(pair) for pair in expected["offset_mapping"]], repr(text)


@pytest.mark.parametrize("name", UNKNOWN)
def test_other_pre_tokenizers_are_left_to_the_library(name):
    tokenizer = tokenizer_with(UNKNOWN[name])
    tokeniser, made = Tokeniser(tokenizer), list(texts(tokenizer, 50))
    assert tokeniser._words is None
    for text, tokens in zip(made, tokeniser(made, special=False, offsets=False), strict=True):
        assert tokens.ids.tolist() == tokenizer(text, add_special_tokens=False)["input_ids"], repr(text)


def test_added_tokens_that_take_in_white_space_are_left_to_the_library():
    assert Tokeniser(build())._words is None


@pytest.mark.parametrize(
    "normalizer, is_known", [(normalizers.NFC(), True), (normalizers.Lowercase(), False)]
)
def test_a_normaliser_may_only_be_one_that_leaves_ascii_alone(normalizer, is_known):
    tokenizer = tokenizer_with(GPT_2)
    tokenizer.backend_tokenizer.normalizer = normalizer
    assert (Tokeniser(tokenizer)._words is not None) == is_known


def test_added_tokens_of_two_kinds_are_left_to_the_library():
    tokenizer = tokenizer_with(GPT_2)
    tokenizer.backend_tokenizer.add_tokens([AddedToken("sea is", normalized=True)])
    assert Tokeniser(tokenizer)._words is None


def test_no_more_words_are_remembered_than_there_is_room_for(monkeypatch):
    monkeypatch.setattr("mlxft.data.words._KEPT", 3)
    tokenizer = tokenizer_with(GPT_2)
    tokeniser = Tokeniser(tokenizer)
    text = "one two three four five six seven one two three"
    [tokens] = tokeniser([text], special=False, offsets=False)
    assert tokens.ids.tolist() == tokenizer(text, add_special_tokens=False)["input_ids"]
    assert len(tokeniser._words._known) <= 3
