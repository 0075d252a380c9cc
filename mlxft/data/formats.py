"""What a row may look like: finds the format, says which objective it is for, and gives the row a type."""

from dataclasses import dataclass
from typing import Any

from mlxft.config.choices import FORMATS
from mlxft.data.checks import (
    TRAIN_FLAGS,
    check_continues,
    checked_answer,
    checked_messages,
    checked_tokens,
    checked_tools,
    filled_text,
    listed,
    shown,
)
from mlxft.data.conventions import alpaca_messages, sharegpt_messages, sharegpt_tools
from mlxft.data.json_row import kind_of
from mlxft.data.sources import Row
from mlxft.errors import InputError


@dataclass(frozen=True)
class Form:
    """The keys by which a format is known. kind: what its rows become, a key of OBJECTIVES."""

    format: str
    kind: str
    required: tuple[str, ...]
    optional: tuple[str, ...] = ()

    def fits(self, values: dict[str, Any]) -> bool:
        """Tells whether a row has what this form requires; labels are true or false, not classes."""
        labelled = "label" not in self.required or isinstance(values.get("label"), bool)
        return labelled and all(key in values for key in self.required)


# In the order they are looked for.
FORMS = (
    Form("preference", "pairs", ("chosen", "rejected"), ("prompt", "system", "tools")),
    Form("messages", "examples", ("messages",), ("tools",)),
    Form("unpaired", "unpaired", ("prompt", "completion", "label"), ("system", "tools")),
    Form("completion", "examples", ("prompt", "completion"), ("tools",)),
    Form("alpaca", "examples", ("instruction", "output"), ("input", "system", "history")),
    Form("sharegpt", "examples", ("conversations",), ("system", "tools")),
    Form("text", "examples", ("text",)),
    Form("tokens", "examples", ("input_ids",), ("completion_mask",)),
    Form("tokens", "pairs", ("prompt_ids", "chosen_ids", "rejected_ids")),
    Form("tokens", "unpaired", ("prompt_ids", "completion_ids", "label")),
    Form("choices", "questions", ("question", "choices", "answer"), ("system",)),
    Form("answer", "questions", ("question", "answer"), ("system",)),
    Form("code", "questions", ("prompt", "test", "entry_point")),
)
KNOWN_KEYS = tuple(dict.fromkeys(key for form in FORMS for key in form.required + form.optional))

# What rows become, and the objectives that train on it.
OBJECTIVES = {"examples": ("sft",), "pairs": ("dpo", "orpo", "cpo", "simpo"), "unpaired": ("kto",)}
_IS = {
    "examples": "a text to learn",
    "pairs": "a pair of answers",
    "unpaired": "an answer with a label",
    "questions": "a question with an answer to check",
}
_NEEDS = {
    "examples": "'messages', 'prompt' and 'completion', 'instruction' and 'output', 'conversations', or "
    "'text'",
    "pairs": "'prompt', 'chosen' and 'rejected'",
    "unpaired": "'prompt', 'completion' and 'label' (true or false)",
}


@dataclass(frozen=True)
class ChatRow:
    """Turns for a chat template. num_context: how many of the first turns are only read, never trained on.

    untrained: places of other answers that are only read.
    """

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None
    num_context: int
    where: str
    untrained: frozenset[int] = frozenset()


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


def chat_row(
    messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None, num_context: int, where: str
) -> ChatRow:
    """Returns checked turns as a row; what they say of whether to train on them stays out of the template."""
    if not any(flag in message for message in messages for flag in TRAIN_FLAGS):
        return ChatRow(messages, tools, num_context, where)
    untrained = frozenset(
        place
        for place, message in enumerate(messages)
        if message["role"] == "assistant" and not all(message.get(flag, True) for flag in TRAIN_FLAGS)
    )
    plain = [{key: value for key, value in each.items() if key not in TRAIN_FLAGS} for each in messages]
    return ChatRow(plain, tools, num_context, where, untrained)


TypedRow = ChatRow | CompletionRow | TextRow | TokenRow


def find_form(row: Row, wanted: str = "auto", kind: str | None = None) -> Form:
    """Returns the form of a set from its first row.

    wanted: data.format. kind: what the rows should become; a row that lacks keys of a named format is
    taken for one of that kind, so that `check_keys` names those that are missing.

    Raises:
        InputError: `wanted` is not a format, or it is auto and the row has no format's keys.
    """
    if wanted not in FORMATS:
        raise InputError(f"data.format={wanted}: must be {', '.join(FORMATS)}.")
    forms = [form for form in FORMS if wanted in ("auto", form.format)]
    for form in forms:
        if form.fits(row.values):
            return form
    if wanted != "auto":
        return next((form for form in forms if form.kind == kind), forms[0])
    needs = [_NEEDS[kind]] if kind else ["'chosen' and 'rejected'", _NEEDS["examples"], "'input_ids'"]
    raise InputError(
        f"{row.where}: no format fits a row with the keys {listed(row.values)}. A row needs "
        f"{', or '.join(needs)}; data.columns maps other names to these."
    )


def check_kind(row: Row, form: Form, kind: str) -> None:
    """Raises InputError when rows of this form do not become `kind`, naming the objective that they fit."""
    if form.kind == kind:
        return
    if kind == "unpaired" and "label" in row.values:
        raise wrong_label(row)
    trains = form.kind in OBJECTIVES
    use = f"trainer.objective={_either(OBJECTIVES[form.kind])}" if trains else "mlxft eval"
    raise InputError(
        f"{row.where}: this row is {_IS[form.kind]} ({listed(form.required)}), which is for "
        f"{use}. Rows for {_either(OBJECTIVES[kind])} have "
        f"{_NEEDS[kind]}.{_other_use(row, form) if kind == 'examples' else ''}"
    )


def wrong_label(row: Row) -> InputError:
    """Returns what to say of a label that is neither true nor false."""
    label = shown(row.values["label"])
    return InputError(f"{row.where}: label is {label}; it must be true (such answers are wanted) or false.")


def check_same(row: Row, form: Form, wanted: str, first: str) -> None:
    """Raises InputError when the row has keys of another format than the set's, which would be ignored.

    wanted: data.format; one that is named reads its own keys and no others. first: where the row is that
    `form` was found by. Rows that lack keys are `check_keys`' matter.
    """
    if wanted != "auto" or not form.fits(row.values):
        return
    own = next(other for other in FORMS if other.fits(row.values))
    if own != form:
        raise InputError(
            f"{row.where}: this row is {_IS[own.kind]} ({listed(own.required)}), and the set's first row, "
            f"{first}, is {_IS[form.kind]} ({listed(form.required)}). Make all rows alike, or write "
            f"data.format={form.format} to read no other keys than the first row's."
        )


def _either(names: tuple[str, ...]) -> str:
    return " or ".join(filter(None, (", ".join(names[:-1]), names[-1])))


def _other_use(row: Row, form: Form) -> str:
    """Returns how a text can be learnt from rows of answers to compare, as a sentence; "" if not at all."""
    prompt, chosen = row.values.get("prompt"), row.values.get("chosen")
    if "messages" in row.values:
        return " To train on its messages: data.format=messages."
    if form.format == "answer":
        return " To train on the answers: data.columns={prompt: question, completion: answer}."
    if form.format == "unpaired":
        return " To train on every completion, whatever its label: data.format=completion."
    if isinstance(chosen, (str, list)) and type(prompt) is type(chosen):
        return " To train on the chosen answers: data.columns={completion: chosen}."
    if isinstance(chosen, list) and len(chosen) > 1:
        return " To train on the chosen conversations: data.columns={messages: chosen}."
    return ""


def check_columns(columns: dict[str, str]) -> None:
    """Raises InputError when `data.columns` maps to a name that no format reads."""
    for name in columns:
        if name not in KNOWN_KEYS:
            raise InputError(
                f"data.columns.{name}: not a name that rows are read by. These are: {', '.join(KNOWN_KEYS)} "
                "(write {our name: the file's name})."
            )


def check_keys(row: Row, form: Form) -> None:
    """Raises InputError when the row lacks keys that its form requires."""
    missing = [key for key in form.required if key not in row.values]
    if missing:
        raise InputError(
            f"{row.where}: this row has no {' and no '.join(map(repr, missing))}, "
            f"only {listed(row.values)}. "
            f"A row of the format {form.format} needs {' and '.join(map(repr, form.required))}."
        )


def type_row(row: Row, format: str, vocab_size: int) -> TypedRow:
    """Returns a row to learn as its format's type.

    Raises:
        InputError: file, line, what is wrong with the row, and what it should be.
    """
    check_keys(row, next(form for form in FORMS if (form.format, form.kind) == (format, "examples")))
    if format == "messages":
        messages = checked_answer(row.values["messages"], "messages", row.where)
        return chat_row(messages, checked_tools(row), 0, row.where)
    if format == "alpaca":
        return ChatRow(alpaca_messages(row), None, 0, row.where)
    if format == "sharegpt":
        return chat_row(sharegpt_messages(row), sharegpt_tools(row), 0, row.where)
    if format == "completion":
        return _completion_row(row)
    if format == "text":
        return TextRow(filled_text(row.values["text"], "text", row.where), row.where)
    return _token_row(row, vocab_size)


def _completion_row(row: Row) -> ChatRow | CompletionRow:
    prompt, completion, where = row.values["prompt"], row.values["completion"], row.where
    if isinstance(prompt, list) and isinstance(completion, list):
        context = checked_messages(prompt, "prompt", where)
        answer = checked_answer(completion, "completion", where)
        check_continues(context, answer, "completion", where)
        return chat_row(context + answer, checked_tools(row), len(context), where)
    if isinstance(prompt, list) or isinstance(completion, list):
        raise InputError(
            f"{where}: prompt is {kind_of(prompt)} and completion is {kind_of(completion)}. "
            "Make both text, or both lists of messages."
        )
    if not isinstance(prompt, str):
        raise InputError(f"{where}: prompt is {kind_of(prompt)}; it must be text or a list of messages.")
    return CompletionRow(prompt, filled_text(completion, "completion", where), where)


def _token_row(row: Row, vocab_size: int) -> TokenRow:
    mask, where = row.values.get("completion_mask"), row.where
    tokens = checked_tokens(row.values["input_ids"], "input_ids", where, vocab_size)
    if mask is None and row.values.get("labels") is not None:
        raise InputError(
            f"{where}: labels is not read. Give completion_mask: one value a token, 0 where the label is "
            "-100 and 1 elsewhere."
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
            raise InputError(f"{where}: completion_mask[{place}] is {shown(value)}; it must be 0 or 1.")
    return TokenRow(tokens, [bool(value) for value in mask], where)
