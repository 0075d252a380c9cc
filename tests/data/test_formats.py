"""The formats of rows: found on the first, checked on every one."""

import pytest

from mlxft.data.formats import (
    ChatRow,
    CompletionRow,
    TextRow,
    TokenRow,
    check_columns,
    check_kind,
    find_form,
    type_row,
)
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
        ({"prompt": "a", "chosen": "b", "rejected": "c"}, "preference"),
        ({"chosen": [USER, ANSWER], "rejected": [USER, ANSWER], "messages": [USER, ANSWER]}, "preference"),
        ({"prompt": "a", "completion": "b", "label": False}, "unpaired"),
        ({"prompt": "a", "completion": "b", "label": 2}, "completion"),
        ({"prompt_ids": [1], "chosen_ids": [2], "rejected_ids": [3]}, "tokens"),
        ({"prompt_ids": [1], "completion_ids": [2], "label": True}, "tokens"),
    ],
)
def test_the_format_is_found_by_the_keys(values, name):
    assert find_form(row(**values)).format == name


def test_a_named_format_is_taken_as_it_is():
    assert find_form(row(text="a", messages=[USER, ANSWER]), "text").format == "text"


def test_keys_of_no_format_are_listed():
    with pytest.raises(
        InputError, match=r"^rows\.jsonl:4: no format fits.*'question', 'reply'.*data\.columns"
    ):
        find_form(row(question="a", reply="b"))


def test_tokens_become_what_their_keys_say():
    assert find_form(row(input_ids=[1]), "tokens").kind == "examples"
    assert find_form(row(prompt_ids=[1], chosen_ids=[2], rejected_ids=[3]), "tokens").kind == "pairs"
    assert find_form(row(prompt_ids=[1], completion_ids=[2], label=True), "tokens").kind == "unpaired"
    assert find_form(row(prompt_ids=[1], chosen_ids=[2]), "tokens", "pairs").kind == "pairs"


PAIR = {"prompt": "a", "chosen": "b", "rejected": "c"}
TALKS = {"chosen": [USER, ANSWER], "rejected": [USER, ANSWER]}


@pytest.mark.parametrize(
    "values, kind, fault",
    [
        (
            PAIR,
            "examples",
            r"a pair of answers \('chosen', 'rejected'\), which is for trainer\.objective=dpo, ",
        ),
        (
            PAIR,
            "examples",
            r"=dpo, orpo, cpo or simpo\. Rows for sft have 'messages', .*{completion: chosen}\.$",
        ),
        (PAIR | {"prompt": [USER]}, "examples", r"'text'\.$"),
        (TALKS, "examples", r"To train on the chosen conversations: data\.columns={messages: chosen}\.$"),
        (TALKS | {"messages": [USER, ANSWER]}, "examples", r"its messages: data\.format=messages\.$"),
        (PAIR, "unpaired", r"cpo or simpo\. Rows for kto have 'prompt', 'completion' and 'label' \(true or"),
        (
            {"messages": [USER, ANSWER]},
            "pairs",
            r"a text to learn .*objective=sft\. Rows for dpo, orpo, cpo or si",
        ),
        (
            {"input_ids": [1]},
            "pairs",
            r"a text to learn \('input_ids'\), .* have 'prompt', 'chosen' and 'rej",
        ),
        (
            {"prompt": "a", "completion": "b", "label": True},
            "examples",
            r"=kto\. .*data\.format=completion\.$",
        ),
        (
            {"prompt": "a", "completion": "b", "label": True},
            "pairs",
            r"an answer with a label .*=kto\. Rows for d",
        ),
        ({"prompt": "a", "completion": "b"}, "unpaired", r"objective=sft\. Rows for kto have"),
    ],
)
def test_rows_for_another_objective_name_it(values, kind, fault):
    with pytest.raises(InputError, match=rf"^rows\.jsonl:4: this row is .*{fault}"):
        check_kind(row(**values), find_form(row(**values), kind=kind), kind)


def test_rows_for_the_objective_pass():
    check_kind(row(**PAIR), find_form(row(**PAIR)), "pairs")
    check_kind(row(text="a"), find_form(row(text="a")), "examples")


def test_keys_of_no_format_are_answered_by_what_the_objective_needs():
    with pytest.raises(
        InputError, match=r"no format fits.*'question'.*needs 'prompt', 'chosen' and 'rejected';"
    ):
        find_form(row(question="a"), kind="pairs")


def test_an_unknown_format_is_an_error():
    with pytest.raises(
        InputError,
        match=r"^data\.format=chat: must be auto, messages, completion, text, preference, unpaired, tokens",
    ):
        find_form(row(text="a"), "chat")


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


def test_turns_say_themselves_whether_they_are_trained_on_and_the_template_does_not_see_it():
    off, on, weightless = ANSWER | {"train": False}, ANSWER | {"train": True}, ANSWER | {"weight": 0}
    typed = type_row(row(messages=[USER, off, USER, on, USER, weightless]), "messages", 9)
    assert typed.messages == [USER, ANSWER] * 3
    assert typed.untrained == {1, 5}
    assert type_row(row(messages=[USER | {"train": False}, ANSWER]), "messages", 9).untrained == frozenset()


@pytest.mark.parametrize(
    "message, fault",
    [
        (ANSWER | {"train": "no"}, r"messages\[1\].train is \"no\"; it must be true or false"),
        (ANSWER | {"train": 0}, r"messages\[1\].train is 0; it must be true or false"),
        (ANSWER | {"weight": 0.5}, r"messages\[1\].weight is 0.5; it must be 1 or 0"),
        (USER | {"train": True}, r"messages\[1\].train is true, but only the assistant's turns"),
    ],
)
def test_whether_to_train_on_a_turn_is_checked(message, fault):
    with pytest.raises(InputError, match=fault):
        type_row(row(messages=[USER, message, USER, ANSWER]), "messages", 9)


def test_a_completion_of_messages_does_not_ask_again_what_the_prompt_asked():
    for completion in ([USER, ANSWER], [USER | {"content": "another"}, ANSWER]):
        with pytest.raises(InputError, match=r"^rows\.jsonl:4: completion begins with a user turn"):
            type_row(row(prompt=[USER], completion=completion), "completion", 9)
    typed = type_row(row(prompt=[USER, ANSWER], completion=[USER, ANSWER]), "completion", 9)
    assert (typed.messages, typed.num_context) == ([USER, ANSWER] * 2, 2)
