"""Turns rows of any format into tokens with masks; the encoders are made when the first row asks."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from mlxft.data.chat import ChatEncoder
from mlxft.data.formats import ChatRow, TokenRow, TypedRow
from mlxft.data.plain_text import TextEncoder
from mlxft.errors import InputError

Encoded = tuple[np.ndarray, np.ndarray]  # tokens (T,) int32, mask (T,) bool


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

    @property
    def reads_tools(self) -> bool:
        """Whether the chat template writes what tools a row has."""
        self._chat = self._chat or ChatEncoder(self._tokenizer)
        return self._chat.reads_tools

    def encode_all(self, rows: Sequence[TypedRow]) -> list[Encoded | InputError]:
        """Returns tokens and mask of each row, or why a row cannot be encoded.

        Raises:
            InputError: there is no tokenizer, or it is not one for such rows.
        """
        chats = [row for row in rows if isinstance(row, ChatRow)]
        texts = [row for row in rows if not isinstance(row, (ChatRow, TokenRow))]
        if (chats or texts) and self._tokenizer is None:
            raise InputError(
                f"{(chats or texts)[0].where}: text needs a tokenizer; only rows of tokens "
                "(data.format=tokens) do without."
            )
        encoded_chats, encoded_texts = iter(self._encode_chats(chats)), iter(self._encode_texts(texts))
        results: list[Encoded | InputError] = []
        for row in rows:
            if isinstance(row, TokenRow):  # ids and mask are what the file says, whatever train_on
                results.append((np.array(row.tokens, dtype=np.int32), np.array(row.mask, dtype=bool)))
            else:
                encoded = next(encoded_chats if isinstance(row, ChatRow) else encoded_texts)
                results.append(encoded if isinstance(encoded, InputError) else self._checked(encoded, row))
        return results

    def _encode_chats(self, rows: list[ChatRow]) -> list[Encoded | InputError]:
        if not rows:
            return []
        self._chat = self._chat or ChatEncoder(self._tokenizer)
        results: list[Encoded | InputError] = []
        for chat in self._chat.encode_all(rows, self._train_on):
            if isinstance(chat, InputError):
                results.append(chat)
            else:
                self.num_unended += chat.num_unended
                results.append((chat.tokens, chat.mask))
        return results

    def _encode_texts(self, rows: list) -> list[Encoded]:
        if not rows:
            return []
        self._text = self._text or TextEncoder(self._tokenizer)
        return self._text.encode_all(rows, self._train_on)

    def _checked(self, encoded: Encoded, row: TypedRow) -> Encoded | InputError:
        highest = int(encoded[0].max(initial=0))
        if highest < self._vocab_size:
            return encoded
        return InputError(
            f"{row.where}: the tokenizer gives token {highest}, and the model's vocabulary ends at "
            f"{self._vocab_size - 1}. This tokenizer is not the model's."
        )
