"""A model's chat template: renders conversations, and knows how they are prompted and closed.

The template writes BOS where it belongs, so the tokenizer adds none of its own: the tokens are those
of `tokenizer.apply_chat_template(messages, tokenize=True)`, which serving sees too.
"""

import re
from dataclasses import dataclass
from typing import Any

import numpy as np
from jinja2 import TemplateError

from mlxft.data.tokenise import Tokeniser
from mlxft.errors import InputError

FIRST_MARK = 0xF0000  # private-use characters: no template and hardly any text has them
_MARKS = re.compile("[\U000f0000-\U000ffffd]")
_PIECES_KEPT = 4096


class Refused(Exception):
    """The template cannot render these messages; the text is its reason."""


@dataclass(frozen=True)
class Rendered:
    """A conversation as text and tokens. tokens: (T,) int32. offsets: (T, 2), each token's characters."""

    text: str
    tokens: np.ndarray
    offsets: np.ndarray

    def token_after(self, character: int) -> int:
        """Returns the first token that ends after `character`, or T."""
        return int(np.searchsorted(self.offsets[:, 1], character, side="right"))

    def text_of(self, first: int, last: int) -> str:
        """Returns the text of the tokens from `first` to `last`, both among them."""
        return self.text[self.offsets[first, 0] : self.offsets[last, 1]]


def huggingface_tokenizer(tokenizer: Any) -> Any:
    """Returns the tokenizer inside mlx-lm's TokenizerWrapper, or `tokenizer` itself.

    The wrapper renders chats, with its own defaults, but cannot be called for offsets.
    """
    return tokenizer._tokenizer if type(tokenizer).__name__ == "TokenizerWrapper" else tokenizer


def has_chat_template(tokenizer: Any) -> bool:
    """Tells whether a tokenizer, mlx-lm's or transformers', has a chat template."""
    return bool(getattr(tokenizer, "has_chat_template", getattr(tokenizer, "chat_template", None)))


def stop_token_ids(tokenizer: Any) -> set[int]:
    """Returns the ids that stop generation: mlx-lm's set where there is one, else the tokenizer's EOS."""
    ids = getattr(tokenizer, "eos_token_ids", None)  # transformers' own tokenizers give one number here
    ids = ids if isinstance(ids, (set, list, tuple)) else [tokenizer.eos_token_id]
    return {id for id in ids if id is not None}


class ChatTemplate:
    """The chat template of a tokenizer, mlx-lm's wrapper or transformers' own.

    prompts: the generation prompts, with thinking on and off. end_ids: tokens that close an answer.
    closing_length: characters from an answer's words to the end of that token.
    added_ids, special_ids: tokens outside the plain text vocabulary; those that are markup only.
    reads_tools: whether it writes what tools a conversation has.

    Raises:
        InputError: the tokenizer has no chat template, or cannot tell which characters a token is.
    """

    def __init__(self, tokenizer: Any):
        self.tokenizer = tokenizer
        self.inner = huggingface_tokenizer(tokenizer)
        if not has_chat_template(tokenizer):
            raise InputError(
                "The model's tokenizer has no chat template, and rows of messages need one. Use an instruct "
                "model, or give the rows as prompt and completion or as text (data.format)."
            )
        if not self.inner.is_fast:
            raise InputError(
                "The model's tokenizer cannot tell which characters a token stands for, and marking answers "
                "needs that. Use a model with a tokenizer.json."
            )
        added = self.inner.added_tokens_decoder
        self.added_ids = set(added) | set(self.inner.all_special_ids)
        self.special_ids = {id for id in added if added[id].special} | set(self.inner.all_special_ids)
        self.stop_ids = stop_token_ids(tokenizer)
        self.end_ids = set(self.stop_ids)
        self.closing_length = 0
        self.prompts: set[str] = set()
        self.reads_tools = False
        self._tokenise = Tokeniser(self.inner)
        self._pieces: dict[tuple[str, ...], list[str] | None] = {}
        self._probe()

    def render(self, messages: list[dict], tools: list[dict] | None, **settings: Any) -> str:
        """Returns the conversation's text. Raises Refused when the template does not take it."""
        try:
            return self.tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, **settings)
        except (TemplateError, TypeError, ValueError, LookupError, AttributeError) as error:
            raise Refused(str(error) or type(error).__name__) from error

    def tokenise(self, text: str) -> Rendered:
        """Returns rendered text with its tokens."""
        return self.tokenise_all([text])[0]

    def tokenise_all(self, texts: list[str]) -> list[Rendered]:
        """Returns rendered texts with their tokens."""
        all_tokens = self._tokenise(texts, special=False, offsets=True)
        return [Rendered(text, each.ids, each.offsets) for text, each in zip(texts, all_tokens, strict=True)]

    def pieces(self, roles: tuple[str, ...]) -> list[str] | None:
        """Returns what the template writes before, between and after turns of these roles without tools.

        None where it does not write each turn's words once and in order.
        """
        if roles not in self._pieces:
            if len(self._pieces) >= _PIECES_KEPT:
                self._pieces.clear()
            self._pieces[roles] = self._find_pieces(roles)
        return self._pieces[roles]

    def _find_pieces(self, roles: tuple[str, ...]) -> list[str] | None:
        marks = [chr(FIRST_MARK + place) for place in range(len(roles))]
        turns = [{"role": role, "content": mark} for role, mark in zip(roles, marks, strict=True)]
        try:
            text = self.render(turns, None)
        except Refused:
            return None
        if _MARKS.findall(text) != marks:
            return None
        return _MARKS.split(text)

    def _probe(self) -> None:
        """Learns from a conversation of two turns how answers are prompted and closed."""
        mark = chr(FIRST_MARK)
        user, answer = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": mark}
        try:
            for setting in ({}, {"enable_thinking": False}, {"enable_thinking": True}):
                bare = self.render([user], None, **setting)
                head = self.render([user], None, add_generation_prompt=True, **setting)
                self.prompts.add(head[shared_prefix(bare, head) :])
            last = self.render([user, answer], None).partition(mark)[2]
            middle = self.render([user, answer, user], None).partition(mark)[2]
        except Refused:
            return  # a template for something else than plain chat: the rows themselves will tell
        closing = self._first_added(last)
        if closing is not None:
            self.end_ids.add(closing[0])
            self.closing_length = closing[2]
            other = self._first_added(middle)
            if other is not None and other[1] == closing[1]:  # the same place, but more turns follow
                self.end_ids.add(other[0])
                self.closing_length = max(closing[2], other[2])
        self._probe_call(user)
        self._probe_tools([user, answer])

    def _probe_call(self, user: dict) -> None:
        """Learns the token that closes a turn of tool calls, which some templates close differently."""
        function = {"name": "look", "arguments": {"at": "it"}}
        call = {"type": "function", "id": "call00001", "function": function}
        turn = {"role": "assistant", "content": "", "tool_calls": [call]}
        try:
            text = self.render([user, turn], None).rstrip()
        except Refused:
            return  # no tools in this template
        tokens = self.tokenise(text).tokens
        last = int(tokens[-1]) if len(tokens) else None
        if "look" in text and last in self.special_ids:
            self.end_ids.add(last)

    def _probe_tools(self, turns: list[dict]) -> None:
        place = {"type": "string", "description": "where"}
        parameters = {"type": "object", "properties": {"at": place}, "required": ["at"]}
        function = {"name": "look", "description": "Looks.", "parameters": parameters}
        try:
            with_tools = self.render(turns, [{"type": "function", "function": function}])
        except Refused:
            return
        self.reads_tools = "look" in with_tools

    def _first_added(self, text: str) -> tuple[int, int, int] | None:
        """Returns (id, start, end) of the first added token in `text`."""
        rendered = self.tokenise(text)
        for token, (start, end) in zip(rendered.tokens.tolist(), rendered.offsets.tolist(), strict=True):
            if token in self.added_ids:
                return token, start, end
        return None


def has_marks(text: str) -> bool:
    """Tells whether a text has characters of those that stand for contents while a template is studied."""
    return not text.isascii() and _MARKS.search(text) is not None


def shared_prefix(a: str, b: str) -> int:
    """Returns how many characters `a` and `b` begin with in common."""
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if a[:middle] == b[:middle] else (low, middle - 1)
    return low


def shared_suffix(a: str, b: str) -> int:
    """Returns how many characters `a` and `b` end with in common."""
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if a[-middle:] == b[-middle:] else (low, middle - 1)
    return low
