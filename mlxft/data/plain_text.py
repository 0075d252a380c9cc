"""Tokens and masks for rows without a chat template: prompt and completion, and plain text."""

from typing import Any

import numpy as np

from mlxft.data.formats import CompletionRow, TextRow
from mlxft.data.template import huggingface_tokenizer, stop_token_ids
from mlxft.errors import InputError


class TextEncoder:
    """Encodes text as it stands, with the tokenizer's own special tokens and an end-of-sequence token.

    The end-of-sequence token is appended where the text does not end with one that stops generation,
    and it is trained: without it a model never learns to stop. BOS stands at most once at the start.

    Raises:
        InputError: the tokenizer has no end-of-sequence token.
    """

    def __init__(self, tokenizer: Any):
        self._inner = huggingface_tokenizer(tokenizer)
        self._stop_ids = stop_token_ids(tokenizer)
        if self._inner.eos_token_id is None:
            raise InputError(
                "The model's tokenizer has no end-of-sequence token, so text could not teach where to stop. "
                "Set eos_token in its tokenizer_config.json, or give rows of tokens (data.format=tokens)."
            )

    def encode_completion(self, row: CompletionRow, train_on: str) -> tuple[np.ndarray, np.ndarray]:
        """Returns (tokens (T,) int32, mask (T,) bool) of prompt + completion + end of sequence.

        The two are joined as they stand and encoded as one text. What the encoding of the prompt alone
        begins with in common is the prompt; a token across the seam belongs to the completion. The
        completion and the end of sequence are trained; with train_on "all" the prompt too.
        """
        tokens = self._closed(self._encode(row.prompt + row.completion))
        mask = np.ones(len(tokens), dtype=bool)
        if train_on != "all":
            mask[: _shared_start(self._encode(row.prompt), tokens[:-1])] = False
        return tokens, mask

    def encode_text(self, row: TextRow) -> tuple[np.ndarray, np.ndarray]:
        """Returns (tokens (T,) int32, mask (T,) bool) of the text and end of sequence, all of it trained."""
        tokens = self._closed(self._encode(row.text))
        return tokens, np.ones(len(tokens), dtype=bool)

    def _encode(self, text: str) -> list[int]:
        tokens = self._inner(text, verbose=False)["input_ids"]
        bos = self._inner.bos_token_id
        twice = bos is not None and tokens[:2] == [bos, bos]  # the text brings its own BOS
        return tokens[1:] if twice else tokens

    def _closed(self, tokens: list[int]) -> np.ndarray:
        closed = bool(tokens) and tokens[-1] in self._stop_ids
        return np.array(tokens if closed else [*tokens, self._inner.eos_token_id], dtype=np.int32)


def _shared_start(prompt: list[int], tokens: np.ndarray) -> int:
    """Returns how many tokens the two begin with in common."""
    size = min(len(prompt), len(tokens))
    differ = np.flatnonzero(np.array(prompt[:size], dtype=np.int64) != tokens[:size])
    return int(differ[0]) if len(differ) else size
