"""Tokens as text: in runs that join to the whole, with nothing in it that a terminal obeys."""

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from mlxft.data.token_text import Run, TokenReader, shown


def alternating(count):
    return np.arange(count) % 2 == 1


def test_runs_of_single_tokens_join_to_the_whole_text_with_its_special_tokens(make_tokenizer):
    tokenizer = make_tokenizer("chatml")
    text = "<|im_start|>user\nWhat is the name of the sea?<|im_end|>\n"
    tokens = np.array(tokenizer.encode(text, add_special_tokens=False), np.int32)
    runs = TokenReader(tokenizer).runs(tokens, alternating(len(tokens)))
    assert "".join(run.text for run in runs) == text
    assert [run.trained for run in runs] == alternating(len(tokens)).tolist()


def test_a_run_keeps_the_space_that_a_decoder_strips_from_the_start_of_a_text():
    words = {"▁the": 0, "▁answer": 1, "▁is": 2, "▁yes": 3}
    inner = Tokenizer(models.WordLevel(words, unk_token="▁the"))
    inner.pre_tokenizer, inner.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner)
    assert tokenizer.decode([3]) == "yes"
    reader, tokens = TokenReader(tokenizer), np.arange(4, dtype=np.int32)
    assert reader.runs(tokens, tokens >= 3) == [Run("the answer is", False), Run(" yes", True)]
    assert reader.runs(tokens[3:], tokens[3:] > 0, before=tokens[:3]) == [Run(" yes", True)]


def test_a_character_whose_bytes_lie_on_both_sides_of_a_seam_is_cut_there(make_tokenizer):
    tokenizer = make_tokenizer()
    tokens = np.array(tokenizer.encode("aéb", add_special_tokens=False), np.int32)
    assert len(tokens) == 4  # é is two bytes, and no merge has both
    runs = TokenReader(tokenizer).runs(tokens, np.arange(4) >= 2)
    assert runs == [Run("a�", False), Run("�b", True)]


def test_without_a_tokenizer_tokens_stay_numbers():
    tokens = np.array([1, 85, 72, 2], np.int32)
    runs = TokenReader(None).runs(tokens, tokens < 80, before=[7])
    assert runs == [Run(" 1", True), Run(" 85", False), Run(" 72 2", True)]
    assert TokenReader(None).runs(tokens, tokens > 100) == [Run("1 85 72 2", False)]


def test_pieces_are_the_vocabularys_and_texts_are_quoted(make_tokenizer):
    tokenizer = make_tokenizer()
    reader, [end] = TokenReader(tokenizer), tokenizer.encode("\n", add_special_tokens=False)
    assert (reader.piece(end), reader.text_of(end)) == ("Ċ", "'\\n'")
    assert reader.piece(len(tokenizer) + 5) == "(none)"  # a model's vocabulary may go on


@pytest.mark.parametrize(
    "text, safe",
    [
        ("\x1b[31mred\x1b[0m", "\\x1b[31mred\\x1b[0m"),
        ("over\rwritten\x08", "over\\x0dwritten\\x08"),
        ("\u202eturned", "\\u202eturned"),
        ("kept\ttab\nline, é, 日本", "kept\ttab\nline, é, 日本"),
    ],
)
def test_nothing_that_a_terminal_obeys_is_left(text, safe):
    assert shown(text) == safe
