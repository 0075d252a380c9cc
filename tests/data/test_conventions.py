"""Alpaca's and sharegpt's rows: what they become, and what is wrong with those that are not right."""

import pytest

from mlxft.config.schema import DataConfig
from mlxft.data.formats import find_form, type_row
from mlxft.data.load import load_examples
from mlxft.data.sources import Row
from mlxft.errors import InputError

ALPACA = {"instruction": "Say hello", "input": "in French", "output": "Bonjour"}
SHAREGPT = {
    "conversations": [
        {"from": "human", "value": "2 and 2?"},
        {"from": "function_call", "value": '{"name": "add", "arguments": {"a": 2, "b": 2}}'},
        {"from": "observation", "value": "4"},
        {"from": "gpt", "value": "Four."},
    ],
    "tools": '[{"name": "add", "description": "adds", "parameters": {"type": "object"}}]',
    "system": "Be brief.",
}


def typed(format, **values):
    return type_row(Row(values, "rows.jsonl:7"), format, 100)


def turns(*pairs):
    return [{"role": role, "content": content} for role, content in pairs]


def test_an_instruction_with_its_input_is_a_users_turn():
    assert typed("alpaca", **ALPACA).messages == turns(
        ("user", "Say hello\n\nin French"), ("assistant", "Bonjour")
    )


@pytest.mark.parametrize("input", ["", " \n", None])
def test_an_empty_input_leaves_the_instruction_alone(input):
    messages = typed("alpaca", **ALPACA | {"input": input}).messages
    assert messages[0] == {"role": "user", "content": "Say hello"}


def test_system_and_history_come_before_the_instruction():
    row = typed("alpaca", instruction="c", output="d", system="s", history=[["a", "b"]])
    assert row.messages == turns(
        ("system", "s"), ("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d")
    )


def test_a_sharegpt_conversation_becomes_messages_with_tools_and_calls():
    row = typed("sharegpt", **SHAREGPT)
    roles = [message["role"] for message in row.messages]
    assert roles == ["system", "user", "assistant", "tool", "assistant"]
    function = {"name": "add", "arguments": {"a": 2, "b": 2}}
    assert row.messages[2] == {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"type": "function", "function": function}],
    }
    assert row.tools == [
        {
            "type": "function",
            "function": {"name": "add", "description": "adds", "parameters": {"type": "object"}},
        }
    ]


@pytest.mark.parametrize("values, format", [(ALPACA, "alpaca"), (SHAREGPT, "sharegpt")])
def test_the_conventions_are_told_by_their_keys(values, format):
    assert find_form(Row(values, "rows.jsonl:1")).format == format
    assert find_form(Row(values | {"text": "### Instruction: ..."}, "rows.jsonl:1")).format == format


@pytest.mark.parametrize(
    "format, change, fault",
    [
        ("alpaca", {"output": " "}, "output is empty"),
        ("alpaca", {"instruction": 3}, "instruction is a number; it must be text"),
        ("alpaca", {"input": ["a"]}, "input is a list; it must be text"),
        ("alpaca", {"history": [["a"]]}, r'history\[0\] is \["a"\]; it must be a list of two texts'),
        ("sharegpt", {"conversations": []}, "conversations is an empty list"),
        ("sharegpt", {"conversations": [{"from": "human"}]}, r"conversations\[0\] has 'from'; a turn needs"),
        (
            "sharegpt",
            {"conversations": [{"role": "user", "content": "a"}]},
            r"conversations\[0\] has 'role', 'content'; .*data\.columns=\{messages: conversations\}",
        ),
        (
            "sharegpt",
            {"conversations": [{"from": "bot", "value": "a"}]},
            r'conversations\[0\]\.from is "bot"; it must be one of system, human, user, gpt',
        ),
        ("sharegpt", {"conversations": [{"from": "gpt", "value": ""}]}, r"conversations\[0\].value is empty"),
        ("sharegpt", {"conversations": [{"from": "gpt", "value": 1}]}, "conversations.0..value is a number"),
        ("sharegpt", {"conversations": [{"from": "human", "value": "a"}]}, "conversations has no assistant"),
        (
            "sharegpt",
            {"conversations": [{"from": "function_call", "value": "add(2)"}]},
            r"conversations\[0\]\.value is not JSON",
        ),
        ("sharegpt", {"tools": "[broken"}, "tools is not JSON"),
        (
            "sharegpt",
            {"conversations": [{"from": "system", "value": "s"}, {"from": "gpt", "value": "a"}]},
            "the conversation begins with a system turn, and the row has a system text besides",
        ),
    ],
)
def test_what_is_wrong_is_named_with_its_place(format, change, fault):
    values = (ALPACA if format == "alpaca" else SHAREGPT) | change
    with pytest.raises(InputError, match=rf"^rows\.jsonl:7: {fault}"):
        typed(format, **values)


def test_alpacas_rows_train_like_the_same_messages(write_rows, make_tokenizer):
    tokenizer = make_tokenizer("chatml")
    same = {"messages": turns(("user", "Say hello\n\nin French"), ("assistant", "Bonjour"))}
    rows = [write_rows([ALPACA], "alpaca.jsonl"), write_rows([same], "messages.jsonl")]
    (one,), report = load_examples(rows[0], DataConfig(), tokenizer, 1000)
    (other,), _ = load_examples(rows[1], DataConfig(), tokenizer, 1000)
    assert one.tokens.tolist() == other.tokens.tolist() and one.mask.tolist() == other.mask.tolist()
    assert report.format == "alpaca"


def test_a_sharegpt_turn_may_say_that_it_is_only_read():
    asked, answered = SHAREGPT["conversations"][0], SHAREGPT["conversations"][3]
    flags = ({"train": False}, {"train": True}, {"weight": 0})
    talk = [turn for flag in flags for turn in (asked, answered | flag)]
    row = typed("sharegpt", conversations=talk, system="Be brief.")
    assert row.untrained == {2, 6}
    assert row.messages[2] == {"role": "assistant", "content": "Four."}
    called = [asked, SHAREGPT["conversations"][1] | {"weight": 0}, *SHAREGPT["conversations"][2:]]
    assert typed("sharegpt", conversations=called).untrained == {1}
    with pytest.raises(InputError, match=r"^rows\.jsonl:7: conversations\[1\]\.weight is 0\.5; it must be"):
        typed("sharegpt", conversations=[asked, answered | {"weight": 0.5}])
