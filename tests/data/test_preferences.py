"""Rows of two answers, and of one answer with a label: what they may look like, and what is a fault."""

import pytest

from mlxft.data.formats import ChatRow, CompletionRow, TokenRow, find_form
from mlxft.data.preferences import PairRow, UnpairedRow, type_pair, type_unpaired
from mlxft.data.sources import Row
from mlxft.errors import InputError

WHERE = "rows.jsonl:4"


def user(content="q"):
    return {"role": "user", "content": content}


def bot(content="a"):
    return {"role": "assistant", "content": content}


def system(content="s"):
    return {"role": "system", "content": content}


CALL = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": {"name": "f"}}]}
RESULT = {"role": "tool", "content": "7"}


def pair(format="preference", **values):
    row = Row(values, WHERE)
    return type_pair(row, find_form(row, format, "pairs"), vocab_size=9)


def unpaired(format="unpaired", **values):
    row = Row(values, WHERE)
    return type_unpaired(row, find_form(row, format, "unpaired"), vocab_size=9)


def turns(typed):
    """Returns (the prompt's turns, the chosen answer's, the rejected answer's)."""
    size = typed.chosen.num_context
    assert typed.rejected.messages[:size] == typed.chosen.messages[:size]
    assert typed.rejected.num_context == size
    return typed.chosen.messages[:size], typed.chosen.messages[size:], typed.rejected.messages[size:]


def test_text_stays_text():
    assert pair(prompt="q", chosen=" yes", rejected=" no") == PairRow(
        CompletionRow("q", " yes", f"{WHERE}: chosen"), CompletionRow("q", " no", f"{WHERE}: rejected"), WHERE
    )
    answer = CompletionRow("q", " yes", WHERE)
    assert unpaired(prompt="q", completion=" yes", label=False) == UnpairedRow(answer, False, WHERE)


def test_a_system_text_stands_before_a_prompt_of_text_with_an_empty_line_between():
    typed = pair(prompt="q", chosen="a", rejected="b", system="Be brief.")
    assert (typed.chosen.prompt, typed.rejected.prompt) == ("Be brief.\n\nq", "Be brief.\n\nq")
    for nothing in ("", " ", None):
        assert pair(prompt="q", chosen="a", rejected="b", system=nothing).chosen.prompt == "q"
    assert unpaired(prompt="q", completion="a", label=True, system="Be brief.").answer.prompt[:2] == "Be"


@pytest.mark.parametrize(
    "prompt, chosen, rejected",
    [
        ([user()], [bot("a")], [bot("b")]),
        ([user()], bot("a"), bot("b")),
        ([user()], bot("a"), [bot("b")]),
        ([user()], "a", "b"),
        ("q", [bot("a")], [bot("b")]),
        ("q", bot("a"), bot("b")),
        (None, [user(), bot("a")], [user(), bot("b")]),
        ("q", [user(), bot("a")], [user(), bot("b")]),
        ([user()], [user(), bot("a")], [user(), bot("b")]),
    ],
)
def test_every_way_to_write_a_conversation_gives_the_same_turns(prompt, chosen, rejected):
    values = {"chosen": chosen, "rejected": rejected} | ({} if prompt is None else {"prompt": prompt})
    assert turns(pair(**values)) == ([user()], [bot("a")], [bot("b")])


def test_whole_conversations_part_where_they_differ_first():
    shared = [system(), user("1"), bot("one"), user("2")]
    typed = pair(chosen=[*shared, bot("a"), user("3"), bot("c")], rejected=[*shared, bot("b")])
    assert turns(typed) == (shared, [bot("a"), user("3"), bot("c")], [bot("b")])


def test_the_last_answer_is_never_prompt():
    same = [user(), bot("a")]
    assert turns(pair(chosen=same, rejected=same)) == ([user()], [bot("a")], [bot("a")])
    longer = [*same, user("more"), bot("b")]
    assert turns(pair(chosen=longer, rejected=same)) == ([user()], longer[1:], [bot("a")])


def test_a_prompt_of_messages_is_as_long_as_it_says():
    typed = pair(prompt=[user()], chosen=[CALL, RESULT, bot("7")], rejected=[CALL, RESULT, bot("8")])
    assert turns(typed) == ([user()], [CALL, RESULT, bot("7")], [CALL, RESULT, bot("8")])


def test_a_system_text_becomes_the_first_turn_of_a_conversation():
    typed = pair(chosen=[user(), bot("a")], rejected=[user(), bot("b")], system="s")
    assert turns(typed) == ([system(), user()], [bot("a")], [bot("b")])
    assert unpaired(prompt="q", completion=[bot()], label=True, system="s").answer == ChatRow(
        [system(), user(), bot()], None, 2, WHERE
    )


def test_both_answers_know_the_tools():
    tools = [{"type": "function", "function": {"name": "f"}}]
    typed = pair(prompt=[user()], chosen=[CALL], rejected=[bot()], tools=tools)
    assert (typed.chosen.tools, typed.rejected.tools) == (tools, tools)
    assert unpaired(prompt=[user()], completion=[CALL], label=True, tools=tools).answer.tools == tools


def test_tokens_are_a_prompt_and_answers_without_it():
    typed = pair(format="tokens", prompt_ids=[1, 2], chosen_ids=[3], rejected_ids=[4, 5])
    assert typed.chosen == TokenRow([1, 2, 3], [False, False, True], WHERE)
    assert typed.rejected == TokenRow([1, 2, 4, 5], [False, False, True, True], WHERE)
    typed = unpaired(format="tokens", prompt_ids=[1], completion_ids=[3], label=True)
    assert typed == UnpairedRow(TokenRow([1, 3], [False, True], WHERE), True, WHERE)


BAD_PAIRS = [
    ({"prompt": "q", "chosen": "a"}, "this row has no 'rejected', only 'prompt', 'chosen'"),
    ({"chosen": "a", "rejected": "b"}, "the row has no prompt, and chosen and rejected are text"),
    ({"prompt": 3, "chosen": "a", "rejected": "b"}, "prompt is a number; it must be text or a list"),
    ({"prompt": "q", "chosen": "", "rejected": "b"}, "chosen is empty"),
    ({"prompt": "q", "chosen": "a", "rejected": " \n"}, "rejected is empty"),
    ({"prompt": "q", "chosen": "a", "rejected": None}, "rejected is null; it must be text, a message or a l"),
    ({"prompt": "q", "chosen": "a", "rejected": [bot()]}, "chosen is text and rejected is a list. Make both"),
    ({"prompt": "q", "chosen": [], "rejected": [bot()]}, "chosen is an empty list"),
    ({"prompt": " ", "chosen": [bot()], "rejected": [bot()]}, "prompt is empty"),
    ({"prompt": [], "chosen": [bot()], "rejected": [bot()]}, "prompt is an empty list"),
    ({"prompt": [user()], "chosen": [bot()], "rejected": [bot("")]}, r"rejected\[0\]\.content is empty"),
    ({"prompt": [user()], "chosen": [user()], "rejected": [bot()]}, "chosen has no assistant turn"),
    (
        {"prompt": [user()], "chosen": [user()], "rejected": [user(), bot()]},
        "chosen has no assistant turn: nothing to train on",
    ),
    (
        {"chosen": [bot("a")], "rejected": [bot("b")]},
        "chosen and rejected have no turn in common to begin with",
    ),
    (
        {"chosen": [user("1"), bot()], "rejected": [user("2"), bot()]},
        "chosen and rejected have no turn in common to begin with",
    ),
    (
        {"chosen": [system(), user("1"), bot()], "rejected": [system(), user("2"), bot()]},
        "chosen and rejected answer different prompts: from turn 2 of the conversation on",
    ),
    (
        {"prompt": "q", "chosen": [bot()], "rejected": [bot()], "system": ["s"]},
        "system is a list; it must be text",
    ),
    (
        {"prompt": [system(), user()], "chosen": [bot()], "rejected": [bot()], "system": "s"},
        "the conversation begins with a system turn, and the row has a system text besides",
    ),
    ({"prompt": "q", "chosen": [bot()], "rejected": [bot()], "tools": "f"}, "tools is text"),
]


@pytest.mark.parametrize("values, fault", BAD_PAIRS)
def test_a_wrong_pair_is_named_with_its_fault(values, fault):
    with pytest.raises(InputError, match=rf"^rows\.jsonl:4: {fault}"):
        pair(**values)


@pytest.mark.parametrize(
    "values, fault",
    [
        (
            {"prompt_ids": [1], "chosen_ids": [2]},
            "this row has no 'rejected_ids', only 'prompt_ids', 'chosen",
        ),
        ({"prompt_ids": [], "chosen_ids": [2], "rejected_ids": [3]}, "prompt_ids is an empty list"),
        ({"prompt_ids": [1], "chosen_ids": [], "rejected_ids": [3]}, "chosen_ids is an empty list"),
        ({"prompt_ids": [1], "chosen_ids": [2], "rejected_ids": [3, 9]}, r"rejected_ids\[1\] is 9; .*0 to 8"),
        ({"prompt_ids": "1", "chosen_ids": [2], "rejected_ids": [3]}, "prompt_ids is text"),
    ],
)
def test_wrong_tokens_of_a_pair_are_named(values, fault):
    with pytest.raises(InputError, match=rf"^rows\.jsonl:4: {fault}"):
        pair(format="tokens", **values)


@pytest.mark.parametrize(
    "values, fault",
    [
        ({"prompt": "q", "completion": "a"}, "this row has no 'label'"),
        ({"prompt": "q", "completion": "a", "label": 1}, "label is 1; it must be true .*or false"),
        ({"prompt": "q", "completion": "a", "label": "good"}, 'label is "good"; it must be true'),
        ({"prompt": "q", "completion": "", "label": True}, "completion is empty"),
        ({"prompt": None, "completion": "a", "label": True}, "prompt is null; it must be text or a list"),
        ({"prompt": [user()], "completion": [user()], "label": True}, "completion has no assistant turn"),
        (
            {"prompt": [user()], "completion": 7, "label": True},
            "completion is a number; it must be text, a m",
        ),
    ],
)
def test_a_wrong_unpaired_row_is_named_with_its_fault(values, fault):
    with pytest.raises(InputError, match=rf"^rows\.jsonl:4: {fault}"):
        unpaired(**values)


def test_a_whole_conversation_with_a_label_is_split_before_its_last_answer():
    talk = [user("1"), bot("a"), user("2"), bot("b")]
    assert unpaired(prompt="2", completion=talk, label=True).answer == ChatRow(talk, None, 3, WHERE)


def test_a_prompt_beside_whole_conversations_has_to_be_one_of_their_questions():
    begin = [user("q"), bot("a"), user("r")]
    both = {"chosen": [*begin, bot("b")], "rejected": [*begin, bot("c")]}
    for prompt in ("q", " r ", "", None):
        assert len(turns(pair(prompt=prompt, **both))[0]) == 3
    with pytest.raises(InputError, match=r'prompt is "another", which the user says nowhere'):
        pair(prompt="another", **both)


@pytest.mark.parametrize(
    "prompt", [[user("another")], [system(), user()]], ids=["another question", "a system turn more"]
)
def test_a_prompt_of_messages_beside_whole_conversations_has_to_be_what_they_begin_with(prompt):
    answers = {"chosen": [user(), bot("a")], "rejected": [user(), bot("b")]}
    with pytest.raises(InputError, match=rf"^{WHERE}: chosen begins with a user turn, which cannot follow"):
        pair(prompt=prompt, **answers)
    with pytest.raises(InputError, match="completion begins with a user turn"):
        unpaired(prompt=prompt, completion=[user(), bot()], label=True)
    talk = [system("another"), user(), bot()]
    with pytest.raises(InputError, match="completion begins with a system turn"):
        unpaired(prompt=[system(), user(), bot()], completion=talk, label=True)


def test_answers_may_go_on_with_the_user_after_a_prompt_that_ends_otherwise():
    for prompt in ([system()], [user(), bot()]):
        typed = pair(prompt=prompt, chosen=[user("more"), bot("a")], rejected=[user("more"), bot("b")])
        assert turns(typed) == (prompt, [user("more"), bot("a")], [user("more"), bot("b")])
