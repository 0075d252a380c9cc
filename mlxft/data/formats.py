"""What a row may look like: finds the format, checks every row against it, and gives it a type."""

import json
from dataclasses import dataclass
from typing import Any

from mlxft.data.sources import Row, kind_of
from mlxft.errors import InputError

ROLES = ("system", "user", "assistant", "tool")
_REASONING = ("reasoning_content", "reasoning", "thinking")  # an assistant turn may hold only this and a call

# In the order they are looked for: the keys that a row of the format must have.
REQUIRED_KEYS = {
    "messages": ("messages",),
    "completion": ("prompt", "completion"),
    "text": ("text",),
    "tokens": ("input_ids",),
}
OPTIONAL_KEYS = {"messages": ("tools",), "completion": ("tools",), "text": (), "tokens": ("completion_mask",)}
KNOWN_KEYS = tuple(key for name in REQUIRED_KEYS for key in REQUIRED_KEYS[name] + OPTIONAL_KEYS[name])


@dataclass(frozen=True)
class ChatRow:
    """Turns for a chat template. num_context: how many of the first turns are only read, never trained on."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None
    num_context: int
    where: str


@dataclass(frozen=True)
class CompletionRow:
    """A prompt, possibly empty, and the text that follows it; no template."""

    prompt: str
    completion: str
    where: str


@dataclass(frozen=True)
class TextRow:
    """Plain text, trained on whole."""

    text: str
    where: str


@dataclass(frozen=True)
class TokenRow:
    """Tokens as they stand. mask: one value a token, true where the token is a target."""

    tokens: list[int]
    mask: list[bool]
    where: str


TypedRow = ChatRow | CompletionRow | TextRow | TokenRow


def find_format(row: Row, wanted: str = "auto") -> str:
    """Returns the format of a set from its first row: messages, completion, text or tokens.

    Raises:
        InputError: `wanted` is not a format, or it is auto and the row has no format's keys.
    """
    if wanted in REQUIRED_KEYS:
        return wanted
    if wanted != "auto":
        raise InputError(f"data.format={wanted}: must be auto, {', '.join(REQUIRED_KEYS)}.")
    for name, keys in REQUIRED_KEYS.items():
        if all(key in row.values for key in keys):
            return name
    raise InputError(
        f"{row.where}: no format fits a row with the keys {_list(row.values)}. A row needs 'messages', or "
        "'prompt' and 'completion', or 'text', or 'input_ids'; data.columns maps other names to these."
    )


def check_columns(columns: dict[str, str]) -> None:
    """Raises InputError when `data.columns` maps to a name that no format reads."""
    for name in columns:
        if name not in KNOWN_KEYS:
            raise InputError(
                f"data.columns.{name}: not a name that rows are read by. These are: {', '.join(KNOWN_KEYS)} "
                "(write {our name: the file's name})."
            )


def type_row(row: Row, format: str, vocab_size: int) -> TypedRow:
    """Returns the row as its format's type.

    Raises:
        InputError: file, line, what is wrong with the row, and what it should be.
    """
    missing = [key for key in REQUIRED_KEYS[format] if key not in row.values]
    if missing:
        raise InputError(
            f"{row.where}: this row has no {' and no '.join(map(repr, missing))}, only {_list(row.values)}. "
            f"A row of the format {format} needs {' and '.join(map(repr, REQUIRED_KEYS[format]))}."
        )
    if format == "messages":
        return _chat_row(row)
    if format == "completion":
        return _completion_row(row)
    if format == "text":
        return TextRow(_filled_text(row.values["text"], "text", row.where), row.where)
    return _token_row(row, vocab_size)


def _chat_row(row: Row) -> ChatRow:
    messages = _checked_messages(row.values["messages"], "messages", row.where)
    if not any(message["role"] == "assistant" for message in messages):
        raise InputError(f"{row.where}: messages has no assistant turn: nothing to train on. Add one.")
    return ChatRow(messages, _checked_tools(row), 0, row.where)


def _completion_row(row: Row) -> ChatRow | CompletionRow:
    prompt, completion, where = row.values["prompt"], row.values["completion"], row.where
    if isinstance(prompt, list) and isinstance(completion, list):
        context = _checked_messages(prompt, "prompt", where)
        answer = _checked_messages(completion, "completion", where)
        if not any(message["role"] == "assistant" for message in answer):
            raise InputError(f"{where}: completion has no assistant turn: nothing to train on. Add one.")
        return ChatRow(context + answer, _checked_tools(row), len(context), where)
    if isinstance(prompt, list) or isinstance(completion, list):
        raise InputError(
            f"{where}: prompt is {kind_of(prompt)} and completion is {kind_of(completion)}. "
            "Make both text, or both lists of messages."
        )
    if not isinstance(prompt, str):
        raise InputError(f"{where}: prompt is {kind_of(prompt)}; it must be text or a list of messages.")
    return CompletionRow(prompt, _filled_text(completion, "completion", where), where)


def _token_row(row: Row, vocab_size: int) -> TokenRow:
    tokens, mask, where = row.values["input_ids"], row.values.get("completion_mask"), row.where
    if not isinstance(tokens, list) or not tokens:
        raise InputError(
            f"{where}: input_ids is {kind_of(tokens)}; it must be a list of one token id or more."
        )
    for place, token in enumerate(tokens):
        if type(token) is not int or not 0 <= token < vocab_size:
            raise InputError(
                f"{where}: input_ids[{place}] is {_show(token)}; "
                f"a token id is a whole number from 0 to {vocab_size - 1} (the model's vocabulary)."
            )
    if mask is None:
        return TokenRow(tokens, [True] * len(tokens), where)
    if not isinstance(mask, list):
        raise InputError(f"{where}: completion_mask is {kind_of(mask)}; it must be a list of 0 and 1.")
    if len(mask) != len(tokens):
        raise InputError(
            f"{where}: completion_mask has {len(mask)} values for {len(tokens)} tokens in input_ids; "
            "it needs one a token."
        )
    for place, value in enumerate(mask):
        if type(value) not in (int, bool) or value not in (0, 1):
            raise InputError(f"{where}: completion_mask[{place}] is {_show(value)}; it must be 0 or 1.")
    return TokenRow(tokens, [bool(value) for value in mask], where)


def _checked_messages(messages: Any, key: str, where: str) -> list[dict[str, Any]]:
    if not isinstance(messages, list) or not messages:
        raise InputError(
            f"{where}: {key} is {kind_of(messages)}; it must be a list of one turn or more, "
            'each {"role": "user", "content": "..."}.'
        )
    for place, message in enumerate(messages):
        _check_message(message, f"{key}[{place}]", where)
    return messages


def _check_message(message: Any, name: str, where: str) -> None:
    if not isinstance(message, dict):
        turn = '{"role": "user", "content": "..."}'
        raise InputError(f"{where}: {name} is {kind_of(message)}; a turn is an object: {turn}.")
    if "role" not in message:
        raise InputError(
            f"{where}: {name} has no 'role', only {_list(message)}. Roles are {', '.join(ROLES)}."
        )
    role, content = message["role"], message.get("content")
    if role not in ROLES:
        raise InputError(f"{where}: {name}.role is {_show(role)}; it must be one of {', '.join(ROLES)}.")
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


def _checked_tools(row: Row) -> list[dict[str, Any]] | None:
    tools = row.values.get("tools")
    if not tools:  # no tools, whether left out, null or an empty list
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise InputError(f"{row.where}: tools is {kind_of(tools)}; it must be a list of objects, one a tool.")
    return tools


def _filled_text(value: Any, key: str, where: str) -> str:
    if not isinstance(value, str):
        raise InputError(f"{where}: {key} is {kind_of(value)}; it must be text.")
    if not value.strip():
        raise InputError(f"{where}: {key} is empty. Write some text, or leave the row out.")
    return value


def _show(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 40 else text[:37] + "..."


def _list(values: dict[str, Any]) -> str:
    return ", ".join(map(repr, values)) or "none"
