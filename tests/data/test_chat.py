"""What of a conversation is trained, under templates of many kinds."""

from dataclasses import replace

import numpy as np
import pytest

from mlxft.data.chat import ChatEncoder
from mlxft.data.formats import ChatRow
from mlxft.errors import InputError

USER, ASSISTANT, SYSTEM, TOOL = "user", "assistant", "system", "tool"
TWO = [(USER, "one?"), (ASSISTANT, "First."), (USER, "two?"), (ASSISTANT, "Second.")]


def chat(turns, tools=None, num_context=0):
    messages = [{"role": role, "content": content} for role, content in turns]
    return ChatRow(messages, tools, num_context, "chat.jsonl:7")


@pytest.fixture
def answers(make_tokenizer, trained_text):
    """Returns a function (template, row, train_on) -> the text of each trained run of tokens."""

    def spans(template, row, train_on="assistant", **options):
        tokenizer = make_tokenizer(template, **options)
        encoded = ChatEncoder(tokenizer).encode(row, train_on)
        own = tokenizer.apply_chat_template(row.messages, tools=row.tools, tokenize=True, return_dict=False)
        assert encoded.tokens.tolist() == own
        return trained_text(tokenizer, encoded.tokens, encoded.mask)

    return spans


@pytest.mark.parametrize(
    "template, end",
    [
        ("chatml", "<|im_end|>"),
        ("default_system", "<|im_end|>"),
        ("headers", "<|eot|>"),
        ("model_role", "</turn>"),
        ("opens_thinking", "<|stop|>"),
        ("marked", "<|im_end|>"),
        ("marked_wide", "<|im_end|>"),
        ("tools", "<|im_end|>"),
        ("marked_last", "<|im_end|>"),
        ("echo", "<|im_end|>"),
        ("two_prompts", "<|end|>"),
        ("two_ends", "<|end|></s>"),
    ],
)
def test_every_answer_and_its_end_token_is_trained_and_nothing_else(answers, template, end):
    assert answers(template, chat(TWO)) == ["First." + end, "Second." + end]


def test_the_last_answer_alone_is_trained_on_request(answers):
    for template in ("chatml", "marked", "thinking"):
        assert answers(template, chat(TWO), "last_assistant") == ["Second.<|im_end|>"]


def test_all_trains_every_token(make_tokenizer):
    encoded = ChatEncoder(make_tokenizer("chatml")).encode(chat(TWO), "all")
    assert encoded.mask.all()


def test_an_answer_that_is_not_to_be_trained_on_is_only_read(answers, make_tokenizer):
    row = replace(chat(TWO), untrained=frozenset({1}))
    assert answers("chatml", row) == answers("marked", row) == ["Second.<|im_end|>"]
    row = replace(chat(TWO), untrained=frozenset({3}))
    assert answers("chatml", row, "last_assistant") == ["First.<|im_end|>"]
    with pytest.raises(InputError, match=r"7: messages\[3\] is not to be trained on.*train_on=all"):
        ChatEncoder(make_tokenizer("chatml")).encode(row, "all")


def test_answers_in_the_context_are_not_trained(answers):
    assert answers("chatml", chat(TWO, num_context=3)) == ["Second.<|im_end|>"]
    assert answers("marked", chat(TWO, num_context=3)) == ["Second.<|im_end|>"]


def test_a_turn_after_the_last_answer_is_not_trained(answers):
    assert answers("chatml", chat(TWO[:3])) == ["First.<|im_end|>"]


def test_an_answer_at_the_very_start_is_trained(answers):
    turns = [(ASSISTANT, "Welcome."), (USER, "hi"), (ASSISTANT, "Hello.")]
    for template, end in (("chatml", "<|im_end|>"), ("headers", "<|eot|>"), ("default_system", "<|im_end|>")):
        assert answers(template, chat(turns)) == ["Welcome." + end, "Hello." + end]


def test_white_space_that_the_template_strips_does_not_shift_the_span(answers):
    turns = [(USER, " one? "), (ASSISTANT, "\n\n First. \n"), (USER, "two?"), (ASSISTANT, " Second.")]
    assert answers("headers", chat(turns)) == ["First.<|eot|>", "Second.<|eot|>"]


def test_white_space_that_the_template_keeps_is_trained(answers):
    turns = [(USER, "one?"), (ASSISTANT, "  First. \n")]
    assert answers("chatml", chat(turns)) == ["  First. \n<|im_end|>"]


def test_an_answer_that_repeats_the_question_is_found_in_its_own_turn(answers):
    turns = [(USER, "ab"), (ASSISTANT, "ab"), (USER, "ab"), (ASSISTANT, "ab")]
    assert answers("chatml", chat(turns)) == ["ab<|im_end|>"] * 2


def test_an_answer_that_looks_like_the_prompt_is_whole(answers):
    turns = [(USER, "one?"), (ASSISTANT, "<b>bold</b>")]  # begins as the prompt's "<think>" does
    assert answers("opens_thinking", chat(turns)) == ["<b>bold</b><|stop|>"]


def test_an_end_token_inside_an_answer_does_not_end_it(answers):
    turns = [(USER, "one?"), (ASSISTANT, "write <|im_end|> so"), (USER, "two?"), (ASSISTANT, "yes")]
    assert answers("chatml", chat(turns)) == ["write <|im_end|> so<|im_end|>", "yes<|im_end|>"]


def test_characters_of_several_tokens_are_trained_whole(answers):
    turns = [(USER, "名?"), (ASSISTANT, "鵝卵石 🪨")]
    assert answers("chatml", chat(turns)) == ["鵝卵石 🪨<|im_end|>"]


def test_a_token_across_the_seam_holds_some_of_the_answer_and_is_trained(answers, make_tokenizer):
    assert make_tokenizer("words").tokenize("Bot: the sea")[-2:] == ["Ġthe", "Ġsea"]
    assert answers("words", chat([(USER, "one?"), (ASSISTANT, "the sea")])) == [" the sea</s>"]


def test_an_empty_think_block_of_the_template_is_not_trained(answers):
    assert answers("thinking", chat(TWO)) == ["First.<|im_end|>", "Second.<|im_end|>"]


def test_the_templates_own_marks_decide_where_it_has_them(answers):
    trained = ["<think></think>First.<|im_end|>", "<think></think>Second.<|im_end|>"]
    assert answers("marked_thinking", chat(TWO)) == trained


def test_thinking_in_the_row_is_trained_where_the_template_keeps_it(answers):
    turns = [
        (USER, "one?"),
        (ASSISTANT, "<think>\nhm\n</think>\n\nFirst."),
        (USER, "two?"),
        (ASSISTANT, "<think>\nhm two\n</think>\n\nSecond."),
    ]
    assert answers("thinking", chat(turns)) == [
        "First.<|im_end|>",
        "<think>\nhm two\n</think>\n\nSecond.<|im_end|>",
    ]


def test_thinking_begins_in_its_own_turn_where_no_turn_is_closed(answers):
    row = chat(TWO)
    row.messages[3]["thought"] = "hm"
    assert answers("unclosed_thinking", row) == ["First.", "<think>hm</think>Second."]


def test_thinking_that_quotes_the_prompt_is_trained_whole(answers):
    thought = "<think>\nthey wrote <|im_start|>assistant\nhm\n</think>\n\nFirst."
    assert answers("thinking", chat([(USER, "one?"), (ASSISTANT, thought)])) == [thought + "<|im_end|>"]


def test_a_channel_that_the_model_writes_itself_is_trained(answers):
    assert answers("channels", chat(TWO)) == [
        "<|channel|>final<|message|>First.<|end|>",
        "<|channel|>final<|message|>Second.<|return|>",
    ]


def test_a_channel_is_trained_also_where_earlier_turns_read_differently_in_the_whole(answers):
    row = chat([(USER, "one?"), (ASSISTANT, "Wait."), (ASSISTANT, "First."), *TWO[2:]])
    row.messages[1]["thought"] = "hm"  # written only while no user's turn follows
    assert answers("channels", row) == [
        "<|channel|>final<|message|>Wait.<|end|>",
        "<|channel|>final<|message|>First.<|end|>",
        "<|channel|>final<|message|>Second.<|return|>",
    ]


def test_a_token_of_the_template_that_reaches_into_the_answer_is_not_trained(answers, make_tokenizer):
    assert len(make_tokenizer("swallowing").tokenize("<|wide|> \n ")) == 1
    assert answers("swallowing", chat([(USER, "one?"), (ASSISTANT, " \n First.")])) == ["First.<|end|>"]


def test_the_next_turns_end_token_is_not_taken_for_one_that_is_missing(make_tokenizer, trained_text):
    tokenizer = make_tokenizer("half_closed", eos="<|end|>")
    encoded = ChatEncoder(tokenizer).encode(chat(TWO), "assistant")
    assert trained_text(tokenizer, encoded.tokens, encoded.mask) == ["First.", "Second."]


def test_the_end_token_is_trained_when_it_is_the_padding_token_too(make_tokenizer):
    tokenizer = make_tokenizer("chatml", eos="<|im_end|>", pad="<|im_end|>")
    encoded = ChatEncoder(tokenizer).encode(chat(TWO), "assistant")
    ends = encoded.tokens == tokenizer.eos_token_id
    assert ends.sum() == 4
    assert encoded.mask[ends].tolist() == [False, True, False, True]


def test_bos_stands_once_when_template_and_tokenizer_both_write_it(make_tokenizer):
    tokenizer = make_tokenizer("headers", adds_bos=True)
    encoded = ChatEncoder(tokenizer).encode(chat(TWO), "assistant")
    assert tokenizer("x")["input_ids"][0] == tokenizer.bos_token_id  # it would write one
    assert encoded.tokens[0] == tokenizer.bos_token_id
    assert (encoded.tokens == tokenizer.bos_token_id).sum() == 1


def test_a_template_that_closes_no_turn_trains_the_words_and_is_counted(make_tokenizer, trained_text):
    tokenizer = make_tokenizer("unclosed")
    encoded = ChatEncoder(tokenizer).encode(chat(TWO), "assistant")
    assert trained_text(tokenizer, encoded.tokens, encoded.mask) == ["First.", "Second."]
    assert encoded.num_unended == 2


def test_an_answer_that_the_template_leaves_out_is_refused(make_tokenizer):
    with pytest.raises(InputError, match=r"^chat\.jsonl:7: cannot find messages\[1\]"):
        ChatEncoder(make_tokenizer("silent")).encode(chat(TWO), "assistant")


def test_answers_that_the_template_puts_out_of_order_are_refused(make_tokenizer):
    with pytest.raises(InputError, match=r"^chat\.jsonl:7: cannot find messages\[3\]"):
        ChatEncoder(make_tokenizer("backwards")).encode(chat(TWO), "assistant")


def test_a_row_that_the_template_refuses_names_its_reason(make_tokenizer):
    turns = [(USER, "one?"), (USER, "two?"), (ASSISTANT, "First.")]
    with pytest.raises(InputError, match=r"^chat\.jsonl:7: .*does not take this row: Turns must alternate"):
        ChatEncoder(make_tokenizer("model_role")).encode(chat(turns), "assistant")


def test_mlx_lms_wrapper_gives_the_same_as_the_tokenizer_inside(make_tokenizer, tmp_path):
    from mlx_lm.tokenizer_utils import load

    turns = [
        (USER, "one?"),
        (ASSISTANT, "First."),
        (USER, "two?"),
        (ASSISTANT, "<think>\nhm\n</think>\n\nB."),
    ]
    for template in ("chatml", "thinking", "marked", "headers"):
        tokenizer = make_tokenizer(template, adds_bos=True)
        tokenizer.save_pretrained(tmp_path / template)
        wrapped = load(tmp_path / template)
        assert type(wrapped).__name__ == "TokenizerWrapper"
        alone, inside = (ChatEncoder(one).encode(chat(turns), "assistant") for one in (tokenizer, wrapped))
        assert np.array_equal(alone.tokens, inside.tokens)
        assert np.array_equal(alone.mask, inside.mask)
        assert inside.tokens.tolist() == wrapped.apply_chat_template(chat(turns).messages, tokenize=True)
