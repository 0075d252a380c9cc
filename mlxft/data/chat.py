"""Turns a conversation into tokens with a mask of exactly what the model is to learn.

The whole conversation is rendered and tokenised once, as the tokenizer itself does it. Supervised
are the assistant's turns with the token that ends each, and nothing that the template wrote.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mlxft.data.answers import find_answers, find_content
from mlxft.data.formats import ChatRow
from mlxft.data.template import ChatTemplate, Refused, Rendered
from mlxft.errors import InputError


@dataclass(frozen=True)
class ChatTokens:
    """tokens: (T,) int32. mask: (T,) bool. num_unended: answers that the template closes with no token."""

    tokens: np.ndarray
    mask: np.ndarray
    num_unended: int = 0


class ChatEncoder:
    """Encodes conversations with a tokenizer's chat template; made once for a set of rows.

    Raises:
        InputError: as `ChatTemplate`.
    """

    def __init__(self, tokenizer: Any):
        self._template = ChatTemplate(tokenizer)

    @property
    def reads_tools(self) -> bool:
        """Whether the template writes what tools a row has."""
        return self._template.reads_tools

    def encode(self, row: ChatRow, train_on: str) -> ChatTokens:
        """Returns the row's tokens, equal to the tokenizer's own rendering, with the mask of what is trained.

        train_on: "assistant" (every answer and its end token), "last_assistant", or "all" (every token).
        Turns before `row.num_context` are trained by "all" only; those in `row.untrained` never.

        Raises:
            InputError: the template refuses the row, leaves out an answer, or hides where it lies.
        """
        [encoded] = self.encode_all([row], train_on)
        if isinstance(encoded, InputError):
            raise encoded
        return encoded

    def encode_all(self, rows: Sequence[ChatRow], train_on: str) -> list[ChatTokens | InputError]:
        """Returns what `encode` does for each row, or the error it would raise."""
        texts = [_outcome(self._render, row) for row in rows]
        rendered = iter(self._template.tokenise_all([text for text in texts if isinstance(text, str)]))
        return [
            _outcome(self._mask, row, next(rendered), train_on) if isinstance(text, str) else text
            for row, text in zip(rows, texts, strict=True)
        ]

    def _render(self, row: ChatRow) -> str:
        try:
            return self._template.render(row.messages, row.tools)
        except Refused as reason:
            raise InputError(
                f"{row.where}: the model's chat template does not take this row: {reason}"
            ) from None

    def _mask(self, row: ChatRow, rendered: Rendered, train_on: str) -> ChatTokens:
        mask = np.zeros(len(rendered.tokens), dtype=bool)
        if train_on == "all":
            if row.untrained:
                raise InputError(
                    f"{row.where}: messages[{min(row.untrained)}] is not to be trained on, but with "
                    "data.train_on=all every token is. Use data.train_on=assistant."
                )
            return ChatTokens(rendered.tokens, ~mask)
        turns = [place for place, message in enumerate(row.messages) if message["role"] == "assistant"]
        turns = [place for place in turns if place >= row.num_context and place not in row.untrained]
        if train_on == "last_assistant":
            turns = turns[-1:]
        num_unended, done = 0, -1
        for turn, span in find_answers(self._template, row, rendered, turns).items():
            if span is None or span[0] <= done:
                raise InputError(
                    f"{row.where}: cannot find messages[{turn}] in the text that the model's chat template "
                    "makes (tool calls need a template that knows tools). Mark the answers in the template "
                    "with {% generation %}, or give the row as prompt and completion."
                )
            first, done = span
            ended = self._ends(rendered, done)
            mask[first : done + 1] = True
            num_unended += not ended
            apart = self._words_apart(row, turn, rendered, first, done)
            said = rendered.text_of(first, done - ended) if first <= done - ended else ""
            self._check_said(row, turn, said)
            if apart is not None:
                mask[apart[0] : apart[1] + 1] = True
                done = apart[1]
        return ChatTokens(rendered.tokens, mask, num_unended)

    def _ends(self, rendered: Rendered, place: int) -> bool:
        token = int(rendered.tokens[place])
        return token in self._template.end_ids or token in self._template.special_ids

    def _words_apart(
        self, row: ChatRow, turn: int, rendered: Rendered, first: int, last: int
    ) -> tuple[int, int] | None:
        """Returns the tokens of a calling turn's words where they stand outside of first to last.

        Some templates write them after the result of the call.
        """
        message = row.messages[turn]
        words = message.get("content")
        if not message.get("tool_calls") or not isinstance(words, str) or not words.strip():
            return None
        if words.strip() in rendered.text_of(first, last):
            return None
        return find_content(self._template, row, rendered, turn)

    def _check_said(self, row: ChatRow, turn: int, said: str) -> None:
        """Refuses an answer of which nothing, or not its tool calls, is in the text `said`."""
        if not said:
            raise InputError(
                f"{row.where}: the model's chat template writes nothing of messages[{turn}], so there is "
                "nothing to train on. A turn of tool calls needs a model whose template knows tools."
            )
        message = row.messages[turn]
        if isinstance(message.get("content"), str):  # its words may name what it calls
            said = said.replace(message["content"].strip(), "", 1)
        for call in message.get("tool_calls") or ():
            function = call.get("function")
            name = function.get("name") if isinstance(function, dict) else call.get("name")
            if isinstance(name, str) and name not in said:
                raise InputError(
                    f"{row.where}: the model's chat template leaves out the call of {name!r} in "
                    f"messages[{turn}]. Use a model whose template knows tools, or take the call out."
                )


def _outcome(make: Callable[..., Any], *arguments: Any) -> Any:
    """Returns what `make` makes, or the InputError it raises: one row's fault must not hide another's."""
    try:
        return make(*arguments)
    except InputError as error:
        return error
