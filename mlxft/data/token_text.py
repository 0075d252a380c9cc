"""Tokens as people read them: the text that runs of them stand for, each one's piece of the vocabulary."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from mlxft.data.template import huggingface_tokenizer

_CONTEXT = 8  # tokens before a run that are decoded with it: a few decide on its first white space

# What would move a terminal's cursor, colour its text or turn its direction, written out.
_CONTROLS = {code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160)) if chr(code) not in "\t\n"}
_DIRECTIONS = {code: f"\\u{code:04x}" for code in (*range(0x202A, 0x202F), *range(0x2066, 0x206A))}


@dataclass(frozen=True)
class Run:
    """The text of neighbouring tokens of which all are trained on, or none."""

    text: str
    trained: bool


class TokenReader:
    """Reads tokens with a tokenizer, mlx-lm's or transformers'; without one (None) they stay numbers.

    has_words: whether there is a tokenizer.
    """

    def __init__(self, tokenizer: Any):
        self._inner = None if tokenizer is None else huggingface_tokenizer(tokenizer)
        self.has_words = self._inner is not None

    def runs(self, tokens: np.ndarray, trained: np.ndarray, before: Sequence[int] = ()) -> list[Run]:
        """Returns the text of tokens (T,) in runs, special tokens included; together it is all of the text.

        trained: (T,) bool. before: tokens that stand before them, whose text is left out.
        """
        edges = [0, *(np.flatnonzero(np.diff(trained)) + 1).tolist(), len(tokens)]
        every = [*map(int, before), *map(int, tokens)]
        runs = []
        for start, stop in pairwise(edges):
            if start < stop:
                text = self._text(every, start + len(before), stop + len(before))
                runs.append(Run(shown(text), bool(trained[start])))
        return runs

    def piece(self, token: int) -> str:
        """Returns what the vocabulary calls a token, such as "Ġthe"."""
        return shown(self._inner.convert_ids_to_tokens(token) or "(none)")

    def text_of(self, token: int) -> str:
        """Returns the text of a token by itself in quotes, such as "' the'"."""
        return repr(self._decoded([token]))

    def _text(self, tokens: list[int], start: int, stop: int) -> str:
        """Returns the text of tokens[start:stop] as it follows on those before."""
        context = tokens[max(start - _CONTEXT, 0) : start]
        if not self.has_words:
            return (" " if context else "") + " ".join(map(str, tokens[start:stop]))
        before, text = self._decoded(context), self._decoded(context + tokens[start:stop])
        if text.startswith(before):
            return text[len(before) :]
        return self._decoded(tokens[start:stop])  # a character's bytes lie on both sides

    def _decoded(self, tokens: list[int]) -> str:
        return self._inner.decode(tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False)


def shown(text: str) -> str:
    """Returns text that is safe to print: control characters but tabs and newlines are written out."""
    return text.translate(_CONTROLS | _DIRECTIONS)
