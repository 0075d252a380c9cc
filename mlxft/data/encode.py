"""Turns a row of any format into tokens with a mask; the encoders are made when the first row asks."""

from typing import Any

import numpy as np

from mlxft.data.chat import ChatEncoder
from mlxft.data.formats import ChatRow, CompletionRow, TextRow, TokenRow, TypedRow
from mlxft.data.plain_text import TextEncoder
from mlxft.errors import InputError


class RowEncoder:
    """Encodes rows for a tokenizer (None: only rows of tokens) and a model's vocabulary.

    train_on: as `data.train_on`. num_unended: answers so far that the chat template ends with no token.
    """

    def __init__(self, tokenizer: Any, vocab_size: int, train_on: str):
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._train_on = train_on
        self._chat: ChatEncoder | None = None
        self._text: TextEncoder | None = None
        self.num_unended = 0

    def encode(self, row: TypedRow) -> tuple[np.ndarray, np.ndarray]:
        """Returns (tokens (T,) int32, mask (T,) bool).

        Raises:
            InputError: there is no tokenizer, it is another model's, or it cannot encode the row.
        """
        if isinstance(row, TokenRow):  # ids and mask are what the file says, whatever train_on
            return np.array(row.tokens, dtype=np.int32), np.array(row.mask, dtype=bool)
        if self._tokenizer is None:
            raise InputError(
                f"{row.where}: text needs a tokenizer; only rows of tokens (data.format=tokens) do without."
            )
        tokens, mask = self._encode_words(row)
        highest = int(tokens.max())
        if highest >= self._vocab_size:
            raise InputError(
                f"{row.where}: the tokenizer gives token {highest}, and the model's vocabulary ends at "
                f"{self._vocab_size - 1}. This tokenizer is not the model's."
            )
        return tokens, mask

    def _encode_words(self, row: ChatRow | CompletionRow | TextRow) -> tuple[np.ndarray, np.ndarray]:
        if isinstance(row, ChatRow):
            self._chat = self._chat or ChatEncoder(self._tokenizer)
            chat = self._chat.encode(row, self._train_on)
            self.num_unended += chat.num_unended
            return chat.tokens, chat.mask
        self._text = self._text or TextEncoder(self._tokenizer)
        if isinstance(row, CompletionRow):
            return self._text.encode_completion(row, self._train_on)
        return self._text.encode_text(row)
