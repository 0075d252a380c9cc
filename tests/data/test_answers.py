"""Finding answers that hold tool calls."""

import pytest

from mlxft.data.chat import ChatEncoder
from mlxft.data.formats import ChatRow
from mlxft.errors import InputError

CALL = {"type": "function", "function": {"name": "add_up", "arguments": {"x": 1, "y": 2}}}
ADD_UP = {"type": "function", "function": {"name": "add_up", "description": "adds", "parameters": {}}}
MESSAGES = [
    {"role": "user", "content": "Add 1 and 2"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "content": "3"},
    {"role": "assistant", "content": "It is 3."},
    {"role": "user", "content": "Thanks"},
    {"role": "assistant", "content": "Bye."},
]


@pytest.fixture
def answers(make_tokenizer, trained_text):
    """Returns a function (template, messages, tools) -> the text of each trained run of tokens."""

    def spans(template, messages, tools=None, train_on="assistant"):
        tokenizer = make_tokenizer(template)
        encoded = ChatEncoder(tokenizer).encode(ChatRow(messages, tools, 0, "calls.jsonl:3"), train_on)
        own = tokenizer.apply_chat_template(messages, tools=tools, tokenize=True, return_dict=False)
        assert encoded.tokens.tolist() == own
        return trained_text(tokenizer, encoded.tokens, encoded.mask)

    return spans


def test_a_call_is_trained_with_the_end_of_its_turn(answers):
    call = '<call>{"name": "add_up", "arguments": {"x": 1, "y": 2}}</call><|im_end|>'
    assert answers("tools", MESSAGES) == [call, "It is 3.<|im_end|>", "Bye.<|im_end|>"]


def test_words_before_a_call_are_trained_with_it(answers):
    messages = [MESSAGES[0], MESSAGES[1] | {"content": "Let me see."}, *MESSAGES[2:]]
    assert answers("tools", messages)[0].startswith("Let me see.<call>")


def test_two_calls_of_one_turn_are_trained(answers):
    other = {"type": "function", "function": {"name": "take_off", "arguments": {}}}
    messages = [MESSAGES[0], MESSAGES[1] | {"tool_calls": [CALL, other]}, *MESSAGES[2:]]
    assert answers("tools", messages)[0].endswith(
        '</call><call>{"name": "take_off", "arguments": {}}</call><|im_end|>'
    )


def test_a_row_whose_last_turn_is_a_call_is_trained(answers):
    assert answers("tools", MESSAGES[:2])[0].endswith("</call><|im_end|>")
    assert answers("folded_tools", MESSAGES[:2]) == ["<call>add_up</call><result>"]


def test_the_rows_tools_reach_the_template_untrained(make_tokenizer):
    tokenizer = make_tokenizer("tools")
    encoded = ChatEncoder(tokenizer).encode(ChatRow(MESSAGES, [ADD_UP], 0, "calls.jsonl:3"), "assistant")
    assert '"description": "adds"' in tokenizer.decode(encoded.tokens[~encoded.mask])


def test_a_result_written_into_the_turn_of_its_call_is_not_trained(answers):
    assert answers("folded_tools", MESSAGES) == [
        "<call>add_up</call><result>",
        "It is 3.</turn>",
        "Bye.</turn>",
    ]


def test_an_answer_after_a_result_begins_there_also_where_earlier_turns_read_differently(answers):
    messages = [MESSAGES[0], MESSAGES[1] | {"thought": "hm"}, *MESSAGES[2:]]
    assert answers("folded_tools", messages) == [
        "<call>add_up</call><result>",
        "It is 3.</turn>",
        "Bye.</turn>",
    ]


def test_a_call_that_the_template_leaves_out_is_refused(make_tokenizer):
    encoder = ChatEncoder(make_tokenizer("chatml"))
    with pytest.raises(InputError, match=r"^calls\.jsonl:3: .*writes nothing of messages\[1\]"):
        encoder.encode(ChatRow(MESSAGES, None, 0, "calls.jsonl:3"), "assistant")
    spoken = [MESSAGES[0], MESSAGES[1] | {"content": "Let me see."}, *MESSAGES[2:]]
    with pytest.raises(
        InputError, match=r"^calls\.jsonl:3: .*leaves out the call of 'add_up' in messages\[1\]"
    ):
        encoder.encode(ChatRow(spoken, None, 0, "calls.jsonl:3"), "assistant")


def test_a_call_outside_what_is_trained_may_be_left_out(answers):
    assert answers("chatml", MESSAGES, train_on="last_assistant") == ["Bye.<|im_end|>"]


def call_in_mistrals_form(name: str) -> str:
    return f'[CALLS] [{{"name": "{name}", "arguments": {{"x": 1, "y": 2}}}}]</s>'


@pytest.mark.parametrize("num_messages", [2, 4, 6])
@pytest.mark.parametrize("tools", [None, [ADD_UP]])
def test_a_call_is_trained_whole_where_nothing_prompts_it(answers, num_messages, tools):
    wanted = [call_in_mistrals_form("add_up"), "It is 3.</s>", "Bye.</s>"]
    assert answers("unprompted", MESSAGES[:num_messages], tools) == wanted[: num_messages // 2]


def test_a_second_exchange_of_calls_is_trained_whole_where_nothing_prompts_it(answers):
    other = {"type": "function", "function": {"name": "take_off", "arguments": {"x": 1, "y": 2}}}
    messages = [*MESSAGES[:3], MESSAGES[1] | {"tool_calls": [other]}, *MESSAGES[2:]]
    first, second = call_in_mistrals_form("add_up"), call_in_mistrals_form("take_off")
    assert answers("unprompted", messages, [ADD_UP]) == [first, second, "It is 3.</s>", "Bye.</s>"]
