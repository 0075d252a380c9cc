"""Text without a template: where the prompt ends, and the end of sequence."""

import pytest

from mlxft.data.formats import CompletionRow, TextRow
from mlxft.data.plain_text import TextEncoder
from mlxft.errors import InputError

WHERE = "rows.jsonl:1"


@pytest.fixture
def encode(make_tokenizer, trained_text):
    """Returns a function (prompt, completion, ...) -> (the whole text, the text of each trained run)."""

    def both(prompt, completion, train_on="assistant", **options):
        tokenizer = make_tokenizer(**options)
        [(tokens, mask)] = TextEncoder(tokenizer).encode_all(
            [CompletionRow(prompt, completion, WHERE)], train_on
        )
        return tokenizer.decode(tokens), trained_text(tokenizer, tokens, mask)

    return both


def test_the_completion_and_an_end_of_sequence_are_trained(encode):
    assert encode("hello", " there") == ("hello there</s>", [" there</s>"])


def test_a_token_across_the_seam_belongs_to_the_completion(encode, make_tokenizer):
    assert make_tokenizer().tokenize("hello the")[-1] == "Ġthe"
    assert encode("hello t", "he") == ("hello the</s>", [" the</s>"])


def test_the_prompt_stays_prompt_where_a_merge_reaches_back_over_the_seam(make_tokenizer, encode):
    assert make_tokenizer().tokenize("hello five") == ["hello", "Ġfive"]
    assert make_tokenizer().tokenize("hello fiveain") == ["hello", "Ġf", "i", "v", "ea", "in"]
    assert encode("hello five", "ain") == ("hello fiveain</s>", ["eain</s>"])
    assert encode("hello five", "a") == ("hello fivea</s>", ["ea</s>"])
    assert encode("<s>hello five", "ain", adds_bos=True) == ("<s>hello fiveain</s>", ["eain</s>"])


def test_white_space_left_out_of_offsets_belongs_to_whom_it_belongs(encode, make_tokenizer):
    tokenizer = make_tokenizer(trims=True)
    assert tokenizer.tokenize("hello  there") == ["hello", "Ġ", "Ġthere"]
    offsets = tokenizer("hello  there", return_offsets_mapping=True)["offset_mapping"]
    assert offsets == [(0, 5), (6, 6), (7, 12)]
    assert encode("hello", " there", trims=True) == ("hello there</s>", [" there</s>"])
    assert encode("hello ", " there", trims=True) == ("hello  there</s>", [" there</s>"])
    assert encode("hello", "  there", trims=True) == ("hello  there</s>", ["  there</s>"])


def test_a_character_of_several_tokens_is_trained_from_its_first(encode):
    assert encode("hello", "🪨") == ("hello🪨</s>", ["🪨</s>"])
    assert encode("🪨", "🪨") == ("🪨🪨</s>", ["🪨</s>"])


def test_a_tokenizer_that_knows_no_offsets_finds_the_prompt_too(trained_text):
    from transformers import ByT5Tokenizer

    tokenizer = ByT5Tokenizer()  # a token a byte
    assert not tokenizer.is_fast
    row = CompletionRow("né", "é!", WHERE)
    [(tokens, mask)] = TextEncoder(tokenizer).encode_all([row], "assistant")
    assert trained_text(tokenizer, tokens, mask) == ["é!</s>"]


def test_an_end_of_sequence_that_is_there_is_not_doubled(encode):
    assert encode("hello", " there</s>") == ("hello there</s>", [" there</s>"])


def test_another_stop_token_of_the_model_ends_the_text_too(make_tokenizer, tmp_path):
    from mlx_lm.tokenizer_utils import load

    make_tokenizer().save_pretrained(tmp_path)
    stop = make_tokenizer().convert_tokens_to_ids("</turn>")
    wrapped = load(tmp_path, eos_token_ids=[stop])
    [(tokens, _)] = TextEncoder(wrapped).encode_all([TextRow("hello</turn>", WHERE)], "assistant")
    assert wrapped.decode(tokens) == "hello</turn>"


def test_bos_is_written_once_and_is_prompt(encode):
    assert encode("hello", " there", adds_bos=True) == ("<s>hello there</s>", [" there</s>"])
    assert encode("<s>hello", " there", adds_bos=True) == ("<s>hello there</s>", [" there</s>"])


def test_without_a_prompt_everything_is_trained(encode):
    assert encode("", "hello") == ("hello</s>", ["hello</s>"])
    assert encode("", "hello", adds_bos=True) == ("<s>hello</s>", ["hello</s>"])


def test_all_trains_the_prompt_too(encode):
    assert encode("hello", " there", "all") == ("hello there</s>", ["hello there</s>"])


def test_a_completion_that_is_only_the_stop_token_is_trained(encode):
    assert encode("hello", "</s>") == ("hello</s>", ["</s>"])


def test_something_is_trained_even_if_the_tokenizer_makes_nothing_of_the_completion(encode):
    assert encode("hello", "~", drops="~", adds_eos=True) == ("hello</s>", ["</s>"])


def test_text_is_trained_whole_with_an_end_of_sequence(make_tokenizer):
    tokenizer = make_tokenizer(adds_bos=True)
    [(tokens, mask)] = TextEncoder(tokenizer).encode_all([TextRow("<s>hello there", WHERE)], "assistant")
    assert tokenizer.decode(tokens) == "<s>hello there</s>"
    assert mask.all()


def test_a_tokenizer_without_an_end_of_sequence_is_refused(make_tokenizer):
    with pytest.raises(InputError, match="no end-of-sequence token"):
        TextEncoder(make_tokenizer(eos=None))
