"""Checks on the values of a row: each returns the value, or says what is wrong with it and where."""

import json
from typing import Any

from mlxft.data.json_row import kind_of
from mlxft.data.sources import Row
from mlxft.errors import InputError

ROLES = ("system", "user", "assistant", "tool")
TRAIN_FLAGS = ("train", "weight")  # of a turn: true or false; OpenAI's name for it, 1 or 0
_REASONING = ("reasoning_content", "reasoning", "thinking")  # an assistant turn may hold only this and a call

Message = dict[str, Any]


def checked_messages(messages: Any, key: str, where: str) -> list[Message]:
    """Returns a list of one turn or more. Raises InputError for anything else, naming the turn."""
    if not isinstance(messages, list) or not messages:
        raise InputError(
            f"{where}: {key} is {kind_of(messages)}; it must be a list of one turn or more, "
            'each {"role": "user", "content": "..."}.'
        )
    for place, message in enumerate(messages):
        _check_message(message, f"{key}[{place}]", where)
    return messages


def checked_answer(messages: Any, key: str, where: str) -> list[Message]:
    """Returns a list of turns that the assistant has a part in. Raises InputError for anything else."""
    if not any(message["role"] == "assistant" for message in checked_messages(messages, key, where)):
        raise InputError(f"{where}: {key} has no assistant turn: nothing to train on. Add one.")
    return messages


def _check_message(message: Any, name: str, where: str) -> None:
    if not isinstance(message, dict):
        turn = '{"role": "user", "content": "..."}'
        raise InputError(f"{where}: {name} is {kind_of(message)}; a turn is an object: {turn}.")
    if "role" not in message:
        raise InputError(
            f"{where}: {name} has no 'role', only {listed(message)}. Roles are {', '.join(ROLES)}."
        )
    role, content = message["role"], message.get("content")
    if role not in ROLES:
        raise InputError(f"{where}: {name}.role is {shown(role)}; it must be one of {', '.join(ROLES)}.")
    for flag in TRAIN_FLAGS:
        if flag in message:
            _check_flag(message[flag], f"{name}.{flag}", role, where)
    calls = message.get("tool_calls")
    if calls is not None and not (isinstance(calls, list) and all(isinstance(call, dict) for call in calls)):
        raise InputError(f"{where}: {name}.tool_calls is {kind_of(calls)}; it must be a list of objects.")
    if content is None and role == "assistant" and calls:
        return
    if not isinstance(content, str):
        have = f"{name}.content is {kind_of(content)}" if "content" in message else f"{name} has no 'content'"
        raise InputError(f"{where}: {have}; it must be text.")
    says_more = role == "assistant" and (calls or any(message.get(key) for key in _REASONING))
    if role in ("user", "assistant") and not content.strip() and not says_more:
        raise InputError(f"{where}: {name}.content is empty. Write the {role}'s turn, or leave the row out.")


def _check_flag(value: Any, name: str, role: str, where: str) -> None:
    kinds = (bool,) if name.endswith("train") else (int, float)
    if type(value) not in kinds or value not in (0, 1):
        wanted = "true or false" if kinds == (bool,) else "1 or 0"
        raise InputError(f"{where}: {name} is {shown(value)}; it must be {wanted}: train on the turn or not.")
    if value and role != "assistant":
        raise InputError(f"{where}: {name} is {shown(value)}, but only the assistant's turns are trained on.")


def check_continues(context: list[Message], answer: list[Message], key: str, where: str) -> None:
    """Raises InputError for an answer that begins with what cannot follow its prompt: a question, say."""
    last, role = context[-1]["role"], answer[0]["role"]
    if role == "system" or role == last == "user":
        raise InputError(
            f"{where}: {key} begins with a {role} turn, which cannot follow the {last} turn that prompt "
            f"ends with. Leave out of {key} what prompt says already, or leave the prompt out."
        )


def checked_tools(row: Row) -> list[dict[str, Any]] | None:
    """Returns the row's tools, None if there are none. Raises InputError for what is no list of them."""
    tools = row.values.get("tools")
    if not tools:  # no tools, whether left out, null or an empty list
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise InputError(f"{row.where}: tools is {kind_of(tools)}; it must be a list of objects, one a tool.")
    return tools


def filled_text(value: Any, key: str, where: str) -> str:
    """Returns text with something in it. Raises InputError for anything else."""
    if not isinstance(value, str):
        raise InputError(f"{where}: {key} is {kind_of(value)}; it must be text.")
    if not value.strip():
        raise InputError(f"{where}: {key} is empty. Write some text, or leave the row out.")
    return value


def checked_tokens(tokens: Any, key: str, where: str, vocab_size: int) -> list[int]:
    """Returns a list of one token id or more. Raises InputError for anything else, naming the place."""
    if not isinstance(tokens, list) or not tokens:
        raise InputError(f"{where}: {key} is {kind_of(tokens)}; it must be a list of one token id or more.")
    for place, token in enumerate(tokens):
        if type(token) is not int or not 0 <= token < vocab_size:
            raise InputError(
                f"{where}: {key}[{place}] is {shown(token)}; "
                f"a token id is a whole number from 0 to {vocab_size - 1} (the model's vocabulary)."
            )
    return tokens


def shown(value: Any) -> str:
    """Returns a value as it may stand in a message: its JSON, cut short."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 40 else text[:37] + "..."


def listed(keys: Any) -> str:
    """Returns keys as they stand in a message: quoted, with commas."""
    return ", ".join(map(repr, keys)) or "none"
