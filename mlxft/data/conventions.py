"""Rows in the two shapes that data sets are passed around in, alpaca's and sharegpt's, as messages."""

import json
from typing import Any

from mlxft.data.checks import TRAIN_FLAGS, Message, checked_answer, filled_text, listed, shown
from mlxft.data.json_row import kind_of
from mlxft.data.sources import Row
from mlxft.errors import InputError

# Who speaks, by the names that sharegpt's descendants use.
SPEAKERS = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "assistant": "assistant",
    "model": "assistant",
    "function_call": "assistant",
    "observation": "tool",
    "function_response": "tool",
    "tool": "tool",
}


def alpaca_messages(row: Row) -> list[Message]:
    """Returns instruction, input and output as a user's and an assistant's turn.

    `input`, where there is any, follows the instruction after an empty line. `system` becomes a system turn,
    `history` (pairs of an instruction and its output) earlier turns.

    Raises: InputError naming what is wrong and where.
    """
    values, where = row.values, row.where
    instruction = filled_text(values["instruction"], "instruction", where)
    given = _optional_text(row, "input")
    asked = f"{instruction}\n\n{given}" if given else instruction
    turns = [*_history(row), {"role": "user", "content": asked}]
    turns.append({"role": "assistant", "content": filled_text(values["output"], "output", where)})
    return _with_system(row, turns)


def sharegpt_messages(row: Row) -> list[Message]:
    """Returns conversations of {"from", "value"} as messages; a function_call becomes a tool call.

    Raises: InputError naming what is wrong and where.
    """
    turns, where = row.values["conversations"], row.where
    if not isinstance(turns, list) or not turns:
        raise InputError(
            f"{where}: conversations is {kind_of(turns)}; it must be a list of one turn or more, "
            'each {"from": "human", "value": "..."}.'
        )
    messages = [_message(turn, f"conversations[{place}]", where) for place, turn in enumerate(turns)]
    return _with_system(row, checked_answer(messages, "conversations", where))


def sharegpt_tools(row: Row) -> list[dict[str, Any]] | None:
    """Returns the row's tools, which may be a JSON text of bare functions, in OpenAI's form; None without."""
    tools = row.values.get("tools")
    if isinstance(tools, str) and tools.strip():
        tools = _parsed(tools, "tools", row.where)
    if not tools or isinstance(tools, str):
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise InputError(f"{row.where}: tools is {kind_of(tools)}; it must be a list of objects, one a tool.")
    return [tool if "function" in tool else {"type": "function", "function": tool} for tool in tools]


def _message(turn: Any, name: str, where: str) -> Message:
    if not isinstance(turn, dict) or "from" not in turn or "value" not in turn:
        hint = ""
        if isinstance(turn, dict) and "role" in turn:
            hint = " Turns of role and content are read with data.columns={messages: conversations}."
        have = f"has {listed(turn)}" if isinstance(turn, dict) else f"is {kind_of(turn)}"
        raise InputError(f"{where}: {name} {have}; a turn needs 'from' and 'value'.{hint}")
    speaker, value = turn["from"], turn["value"]
    if not isinstance(speaker, str) or speaker not in SPEAKERS:
        known = ", ".join(SPEAKERS)
        raise InputError(f"{where}: {name}.from is {shown(speaker)}; it must be one of {known}.")
    if not isinstance(value, str):
        raise InputError(f"{where}: {name}.value is {kind_of(value)}; it must be text.")
    role = SPEAKERS[speaker]
    flags = {flag: turn[flag] for flag in TRAIN_FLAGS if flag in turn}
    if speaker == "function_call":
        calls = _calls(value, f"{name}.value", where)
        return {"role": role, "content": "", "tool_calls": calls} | flags
    if role in ("user", "assistant"):
        filled_text(value, f"{name}.value", where)
    return {"role": role, "content": value} | flags


def _calls(value: str, name: str, where: str) -> list[dict[str, Any]]:
    calls = _parsed(value, name, where)
    calls = calls if isinstance(calls, list) else [calls]
    if not calls or not all(isinstance(call, dict) and isinstance(call.get("name"), str) for call in calls):
        raise InputError(f'{where}: {name} is no call; write {{"name": "...", "arguments": {{...}}}}.')
    return [{"type": "function", "function": {"arguments": {}} | call} for call in calls]


def _parsed(text: str, name: str, where: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{where}: {name} is not JSON ({error}).") from None


def _history(row: Row) -> list[Message]:
    pairs = row.values.get("history") or []
    turns: list[Message] = []
    for place, pair in enumerate(pairs if isinstance(pairs, list) else [pairs]):
        if not isinstance(pair, list) or len(pair) != 2:
            raise InputError(
                f"{row.where}: history[{place}] is {shown(pair)}; it must be a list of two texts, what was "
                "asked and what was answered."
            )
        for role, text in zip(("user", "assistant"), pair, strict=True):
            turns.append({"role": role, "content": filled_text(text, f"history[{place}]", row.where)})
    return turns


def _with_system(row: Row, turns: list[Message]) -> list[Message]:
    system = _optional_text(row, "system")
    if not system:
        return turns
    if turns[0]["role"] == "system":
        raise InputError(
            f"{row.where}: the conversation begins with a system turn, and the row has a system text "
            "besides. Keep one of them."
        )
    return [{"role": "system", "content": system}, *turns]


def _optional_text(row: Row, key: str) -> str:
    value = row.values.get(key)
    if value is None:
        return ""
    if not isinstance(value, str):
        raise InputError(f"{row.where}: {key} is {kind_of(value)}; it must be text.")
    return value if value.strip() else ""
