"""Rows of two answers to compare, and of one answer with a label: checked, and given a type.

Text stays plain text, without a chat template. Where the prompt or the answers are messages, all of
the row is a conversation: a prompt that is text becomes the user's turn, an answer that is text the
assistant's. A system text stands first: as a turn, or before plain text with an empty line between.
"""

from dataclasses import dataclass
from typing import Any

from mlxft.data.checks import (
    Message,
    check_continues,
    checked_answer,
    checked_messages,
    checked_tokens,
    checked_tools,
    filled_text,
    shown,
)
from mlxft.data.formats import (
    ChatRow,
    CompletionRow,
    Form,
    TokenRow,
    chat_row,
    check_keys,
    wrong_label,
)
from mlxft.data.json_row import kind_of
from mlxft.data.sources import Row
from mlxft.errors import InputError

AnswerRow = ChatRow | CompletionRow | TokenRow
_Answers = dict[str, list[Message]]  # {the row's key: an answer's turns}


@dataclass(frozen=True)
class PairRow:
    """Two rows of one prompt; what they train on are the answers."""

    chosen: AnswerRow
    rejected: AnswerRow
    where: str


@dataclass(frozen=True)
class UnpairedRow:
    """A row that trains on its answer. label: whether the answer is wanted."""

    answer: AnswerRow
    label: bool
    where: str


def type_pair(row: Row, form: Form, vocab_size: int) -> PairRow:
    """Returns a row of the format preference, or of tokens, as a pair.

    Without a prompt, chosen and rejected are whole conversations: what they begin with in common, turn
    by turn, is the prompt, but never their last answer.

    Raises:
        InputError: file, line, what is wrong with the row, and what it should be.
    """
    check_keys(row, form)
    keys = ("chosen", "rejected")
    if form.format == "tokens":
        return PairRow(*(_answer_tokens(row, f"{key}_ids", vocab_size) for key in keys), row.where)
    return PairRow(*_answer_rows(row, keys), row.where)


def type_unpaired(row: Row, form: Form, vocab_size: int) -> UnpairedRow:
    """Returns a row of the format unpaired, or of tokens, as an answer with its label.

    Raises:
        InputError: file, line, what is wrong with the row, and what it should be.
    """
    check_keys(row, form)
    label = row.values["label"]
    if not isinstance(label, bool):
        raise wrong_label(row)
    if form.format == "tokens":
        return UnpairedRow(_answer_tokens(row, "completion_ids", vocab_size), label, row.where)
    if row.values["prompt"] is None:
        raise InputError(f"{row.where}: prompt is null; it must be text or a list of messages.")
    return UnpairedRow(*_answer_rows(row, ("completion",)), label, row.where)


def _answer_tokens(row: Row, key: str, vocab_size: int) -> TokenRow:
    prompt = checked_tokens(row.values["prompt_ids"], "prompt_ids", row.where, vocab_size)
    answer = checked_tokens(row.values[key], key, row.where, vocab_size)
    return TokenRow(prompt + answer, [False] * len(prompt) + [True] * len(answer), row.where)


def _answer_rows(row: Row, keys: tuple[str, ...]) -> list[AnswerRow]:
    """Returns a row for the answer under each key, all with the same prompt."""
    prompt, system = row.values.get("prompt"), _system_text(row)
    if not isinstance(prompt, (str, list, type(None))):
        raise InputError(f"{row.where}: prompt is {kind_of(prompt)}; it must be text or a list of messages.")
    answers = {key: row.values[key] for key in keys}
    answers = {key: [value] if isinstance(value, dict) else value for key, value in answers.items()}
    if _are_text(answers, row.where) and not isinstance(prompt, list):
        return _text_rows(row, answers, system)
    context, answers = _split_turns(prompt, _answer_turns(answers, row.where), row.where)
    _check_openings(answers, len(context), row.where)
    if system:
        context = _with_system(system, context, row.where)
    tools = checked_tools(row)
    return [chat_row(context + answers[key], tools, len(context), _branch(row, key, keys)) for key in keys]


def _are_text(answers: dict[str, Any], where: str) -> bool:
    """Tells whether the answers are text; if not, they are lists. Raises InputError for anything else."""
    for key, value in answers.items():
        if not isinstance(value, (str, list)):
            raise InputError(
                f"{where}: {key} is {kind_of(value)}; it must be text, a message or a list of messages."
            )
    if len({type(value) for value in answers.values()}) > 1:
        kinds = " and ".join(f"{key} is {kind_of(value)}" for key, value in answers.items())
        raise InputError(f"{where}: {kinds}. Make both text, or both lists of messages.")
    return all(isinstance(value, str) for value in answers.values())


def _text_rows(row: Row, answers: dict[str, str], system: str) -> list[AnswerRow]:
    prompt, where = row.values.get("prompt"), row.where
    if prompt is None:
        raise InputError(
            f"{where}: the row has no prompt, and {' and '.join(answers)} are text. Give the prompt by "
            "itself, or write whole conversations as lists of messages."
        )
    begin = f"{system}\n\n{prompt}" if system else prompt
    texts = {key: filled_text(value, key, where) for key, value in answers.items()}
    return [CompletionRow(begin, text, _branch(row, key, tuple(texts))) for key, text in texts.items()]


def _answer_turns(answers: dict[str, Any], where: str) -> _Answers:
    return {
        key: [{"role": "assistant", "content": filled_text(value, key, where)}]
        if isinstance(value, str)
        else checked_answer(value, key, where)
        for key, value in answers.items()
    }


def _split_turns(
    prompt: str | list[Message] | None, answers: _Answers, where: str
) -> tuple[list[Message], _Answers]:
    """Returns the prompt's turns, and the answers without them."""
    whole = all(turns[0]["role"] in ("system", "user") for turns in answers.values())
    if isinstance(prompt, list):
        context = checked_messages(prompt, "prompt", where)
        repeated = all(turns[: len(context)] == context for turns in answers.values())
        num_shared = len(context) if whole and repeated else 0
        for key, turns in answers.items():
            if not num_shared:
                check_continues(context, turns, key, where)
        return context, _after(num_shared, answers, where)
    if isinstance(prompt, str) and not whole:
        return [{"role": "user", "content": filled_text(prompt, "prompt", where)}], answers
    # Whole conversations; a prompt that is text beside them says once more what they begin with.
    turns = list(answers.values())
    num_shared = min(_last_answer(each) for each in turns)
    while any(each[:num_shared] != turns[0][:num_shared] for each in turns):
        num_shared -= 1
    if num_shared == 0:
        raise InputError(
            f"{where}: {' and '.join(answers)} have no turn in common to begin with, and the row has no "
            "prompt of messages. Give the prompt, or let both conversations begin with it."
        )
    context = turns[0][:num_shared]
    if isinstance(prompt, str):
        _check_repeats(prompt, context, answers, where)
    return context, _after(num_shared, answers, where)


def _check_repeats(prompt: str, context: list[Message], answers: _Answers, where: str) -> None:
    """Refuses a prompt that is none of what the user says in the turns that the conversations begin with."""
    asked = [turn["content"] for turn in context if turn["role"] == "user"]
    if not prompt.strip() or any(isinstance(text, str) and text.strip() == prompt.strip() for text in asked):
        return
    raise InputError(
        f"{where}: prompt is {shown(prompt)}, which the user says nowhere in what {' and '.join(answers)} "
        "begin with in common. They are whole conversations: take the prompt out, or make it the same."
    )


def _after(num_shared: int, answers: _Answers, where: str) -> _Answers:
    return {key: checked_answer(turns[num_shared:], key, where) for key, turns in answers.items()}


def _last_answer(turns: list[Message]) -> int:
    return max(place for place, message in enumerate(turns) if message["role"] == "assistant")


def _check_openings(answers: _Answers, num_context: int, where: str) -> None:
    """Refuses answers to different questions: what precedes the assistant's first turn must be the same."""
    openings = []
    for turns in answers.values():
        first = next(place for place, message in enumerate(turns) if message["role"] == "assistant")
        openings.append(turns[:first])
    if any(opening != openings[0] for opening in openings):
        raise InputError(
            f"{where}: {' and '.join(answers)} answer different prompts: from turn {num_context + 1} of the "
            "conversation on they differ before the assistant speaks. Both need the same prompt."
        )


def _system_text(row: Row) -> str:
    system = row.values.get("system")
    if system is None:
        return ""
    if not isinstance(system, str):
        raise InputError(f"{row.where}: system is {kind_of(system)}; it must be text.")
    return system if system.strip() else ""


def _with_system(system: str, context: list[Message], where: str) -> list[Message]:
    if context[0]["role"] == "system":
        raise InputError(
            f"{where}: the conversation begins with a system turn, and the row has a system text besides. "
            "Keep one of them."
        )
    return [{"role": "system", "content": system}, *context]


def _branch(row: Row, key: str, keys: tuple[str, ...]) -> str:
    """Returns where an answer is, for messages that count its conversation's turns."""
    return f"{row.where}: {key}" if len(keys) > 1 else row.where
