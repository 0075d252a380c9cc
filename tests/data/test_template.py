"""What is learnt of a chat template, and what it cannot do without."""

import pytest

from mlxft.data.template import ChatTemplate, Refused, shared_prefix, shared_suffix, stop_token_ids
from mlxft.errors import InputError


def names(tokenizer, ids):
    return {tokenizer.convert_ids_to_tokens(id) for id in ids}


@pytest.mark.parametrize(
    "template, ends",
    [
        ("chatml", {"</s>", "<|im_end|>"}),
        ("model_role", {"</s>", "</turn>"}),
        ("channels", {"</s>", "<|return|>", "<|end|>"}),
        ("folded_tools", {"</s>", "</turn>", "<result>"}),
        ("unclosed", {"</s>"}),
    ],
)
def test_the_tokens_that_close_an_answer_are_read_off_the_template(make_tokenizer, template, ends):
    tokenizer = make_tokenizer(template)
    assert names(tokenizer, ChatTemplate(tokenizer).end_ids) == ends


def test_the_prompts_with_thinking_on_and_off_are_known(make_tokenizer):
    assert ChatTemplate(make_tokenizer("thinking")).prompts == {
        "<|im_start|>assistant\n",
        "<|im_start|>assistant\n<think>\n\n</think>\n\n",
    }


def test_a_tokenizer_without_a_chat_template_is_refused(make_tokenizer):
    with pytest.raises(InputError, match="no chat template"):
        ChatTemplate(make_tokenizer(None))


def test_a_faulty_row_is_a_refusal_with_the_templates_reason(make_tokenizer):
    template = ChatTemplate(make_tokenizer("chatml"))
    with pytest.raises(Refused, match="NoneType|content|Undefined"):
        template.render([{"role": "user", "content": None}], None)


def test_mlx_lms_set_of_stop_tokens_is_taken_where_there_is_one(make_tokenizer, tmp_path):
    from mlx_lm.tokenizer_utils import load

    tokenizer = make_tokenizer("chatml")
    tokenizer.save_pretrained(tmp_path)
    wrapped = load(tmp_path, eos_token_ids=[7, 9])
    assert stop_token_ids(wrapped) == {7, 9, tokenizer.eos_token_id}
    assert stop_token_ids(tokenizer) == {tokenizer.eos_token_id}


@pytest.mark.parametrize(
    "a, b, prefix, suffix",
    [("", "", 0, 0), ("abc", "abc", 3, 3), ("abc", "abd", 2, 0), ("xbc", "abc", 0, 2), ("aa", "aaaa", 2, 2)],
)
def test_shared_beginnings_and_ends_are_counted_in_characters(a, b, prefix, suffix):
    assert shared_prefix(a, b) == shared_prefix(b, a) == prefix
    assert shared_suffix(a, b) == shared_suffix(b, a) == suffix
