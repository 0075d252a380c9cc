"""The formats of rows: found on the first, checked on every one."""

import pytest

from mlxft.data.formats import ChatRow, CompletionRow, TextRow, TokenRow, check_columns, find_format, type_row
from mlxft.data.sources import Row
from mlxft.errors import InputError

USER, ANSWER = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}


def row(**values):
    return Row(values, "rows.jsonl:4")


@pytest.mark.parametrize(
    "values, name",
    [
        ({"messages": [USER, ANSWER]}, "messages"),
        ({"prompt": "a", "completion": "b"}, "completion"),
        ({"text": "a"}, "text"),
        ({"input_ids": [1, 2]}, "tokens"),
        ({"text": "a", "messages": [USER, ANSWER]}, "messages"),
        ({"prompt": "a", "text": "b"}, "text"),
    ],
)
def test_the_format_is_found_by_the_keys(values, name):
    assert find_format(row(**values)) == name


def test_a_named_format_is_taken_as_it_is():
    assert find_format(row(text="a", messages=[USER, ANSWER]), "text") == "text"


def test_keys_of_no_format_are_listed():
    with pytest.raises(
        InputError, match=r"^rows\.jsonl:4: no format fits.*'instruction', 'output'.*data\.columns"
    ):
        find_format(row(instruction="a", output="b"))


def test_an_unknown_format_is_an_error():
    with pytest.raises(
        InputError,
        match=r"^data\.format=chat: must be auto, messages, completion, text, preference, unpaired, tokens",
    ):
        find_format(row(text="a"), "chat")


def test_columns_can_only_be_mapped_to_names_that_are_read():
    check_columns({"prompt": "question", "completion": "answer", "tools": "functions"})
    with pytest.raises(InputError, match=r"^data\.columns\.promt: .*chosen, rejected, prompt, .*messages"):
        check_columns({"promt": "question"})


def test_good_rows_are_typed():
    calls = [{"type": "function", "function": {"name": "f", "arguments": {}}}]
    messages = [
        {"role": "system", "content": ""},
        USER,
        {"role": "assistant", "content": None, "tool_calls": calls},
        {"role": "tool", "content": "", "tool_call_id": "1"},
        {"role": "assistant", "content": "", "reasoning_content": "hm"},
        ANSWER,
    ]
    tools = [{"type": "function"}]
    where = "rows.jsonl:4"
    assert type_row(row(messages=messages, tools=tools), "messages", 9) == ChatRow(messages, tools, 0, where)
    assert type_row(row(messages=[USER, ANSWER], tools=[]), "messages", 9).tools is None
    pair = row(prompt=[USER, ANSWER, USER], completion=[ANSWER])
    assert type_row(pair, "completion", 9) == ChatRow([USER, ANSWER, USER, ANSWER], None, 3, where)
    assert type_row(row(prompt="", completion="b"), "completion", 9) == CompletionRow("", "b", where)
    assert type_row(row(text=" a"), "text", 9) == TextRow(" a", where)
    assert type_row(row(input_ids=[0, 8]), "tokens", 9) == TokenRow([0, 8], [True, True], where)
    typed = type_row(row(input_ids=[0, 8], completion_mask=[0, True]), "tokens", 9)
    assert typed == TokenRow([0, 8], [False, True], where)


BAD_ROWS = [
    ("messages", {"text": "a"}, "this row has no 'messages', only 'text'"),
    ("messages", {"messages": "a"}, "messages is text; it must be a list of one turn or more"),
    ("messages", {"messages": []}, "messages is an empty list"),
    ("messages", {"messages": ["a"]}, r"messages\[0\] is text; a turn is an object"),
    ("messages", {"messages": [{"content": "a"}]}, r"messages\[0\] has no 'role', only 'content'"),
    (
        "messages",
        {"messages": [{"role": "human", "content": "a"}]},
        r'messages\[0\]\.role is "human"; .*user, ass',
    ),
    ("messages", {"messages": [{"role": ["user"], "content": "a"}]}, r"messages\[0\]\.role is \[\"user\"\]"),
    (
        "messages",
        {"messages": [USER, {"role": "assistant"}]},
        r"messages\[1\] has no 'content'; it must be text",
    ),
    (
        "messages",
        {"messages": [USER, {"role": "assistant", "content": None}]},
        r"messages\[1\]\.content is null",
    ),
    (
        "messages",
        {"messages": [{"role": "user", "content": [1]}, ANSWER]},
        r"messages\[0\]\.content is a list",
    ),
    (
        "messages",
        {"messages": [USER, {"role": "assistant", "content": " \n"}]},
        r"messages\[1\]\.content is empty",
    ),
    ("messages", {"messages": [{"role": "user", "content": ""}, ANSWER]}, r"messages\[0\]\.content is empty"),
    ("messages", {"messages": [USER, ANSWER | {"tool_calls": "f()"}]}, r"messages\[1\]\.tool_calls is text"),
    ("messages", {"messages": [USER]}, "messages has no assistant turn"),
    ("messages", {"messages": [USER, ANSWER], "tools": '[{"a": 1}]'}, "tools is text; it must be a list"),
    ("completion", {"prompt": "a"}, "this row has no 'completion', only 'prompt'"),
    ("completion", {"prompt": "a", "completion": ""}, "completion is empty"),
    ("completion", {"prompt": "a", "completion": 3}, "completion is a number; it must be text"),
    (
        "completion",
        {"prompt": None, "completion": "b"},
        "prompt is null; it must be text or a list of messages",
    ),
    (
        "completion",
        {"prompt": [USER], "completion": "b"},
        "prompt is a list and completion is text. Make both",
    ),
    ("completion", {"prompt": [USER], "completion": [USER]}, "completion has no assistant turn"),
    ("completion", {"prompt": [], "completion": [ANSWER]}, "prompt is an empty list"),
    ("text", {"text": ""}, "text is empty"),
    ("text", {"text": ["a"]}, "text is a list; it must be text"),
    ("tokens", {"input_ids": []}, "input_ids is an empty list"),
    ("tokens", {"input_ids": "1 2"}, "input_ids is text"),
    ("tokens", {"input_ids": [1, 9]}, r"input_ids\[1\] is 9; .*from 0 to 8"),
    ("tokens", {"input_ids": [-1, 2]}, r"input_ids\[0\] is -1"),
    ("tokens", {"input_ids": [1, 2.0]}, r"input_ids\[1\] is 2\.0"),
    ("tokens", {"input_ids": [1, True]}, r"input_ids\[1\] is true"),
    ("tokens", {"input_ids": [1, None]}, r"input_ids\[1\] is null"),
    ("tokens", {"input_ids": [1, 2], "completion_mask": [1]}, "completion_mask has 1 values for 2 tokens"),
    (
        "tokens",
        {"input_ids": [1, 2], "completion_mask": [0, 2]},
        r"completion_mask\[1\] is 2; it must be 0 or 1",
    ),
    ("tokens", {"input_ids": [1, 2], "completion_mask": "01"}, "completion_mask is text"),
]


@pytest.mark.parametrize("format, values, fault", BAD_ROWS)
def test_a_wrong_row_is_named_with_its_fault(format, values, fault):
    with pytest.raises(InputError, match=rf"^rows\.jsonl:4: {fault}"):
        type_row(row(**values), format, vocab_size=9)
