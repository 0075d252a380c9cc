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

        The two are joined as they stand and encoded as one text; a token across the seam belongs to the
        completion. The completion and the end of sequence are trained; with train_on "all" the prompt too.
        """
        joined, starts = self._encode(row.prompt + row.completion)
        tokens = self._closed(joined)
        mask = np.ones(len(tokens), dtype=bool)
        if train_on != "all":
            # What the prompt alone begins with too; by offsets more, where merges reach back over the seam.
            prompt = np.array(self._encode(row.prompt)[0], dtype=np.int32)
            mask[: max(shared_start(prompt, tokens[:-1]), _first_at(starts, len(row.prompt)))] = False
        return tokens, mask

    def encode_text(self, row: TextRow) -> tuple[np.ndarray, np.ndarray]:
        """Returns (tokens (T,) int32, mask (T,) bool) of the text and end of sequence, all of it trained."""
        tokens = self._closed(self._encode(row.text)[0])
        return tokens, np.ones(len(tokens), dtype=bool)

    def _encode(self, text: str) -> tuple[list[int], list[int]]:
        """Returns the text's tokens, and the character each starts at (none if the tokenizer can't tell)."""
        can_tell = self._inner.is_fast
        encoded = self._inner(text, return_offsets_mapping=can_tell, verbose=False)
        tokens = encoded["input_ids"]
        starts = [start for start, _ in encoded["offset_mapping"]] if can_tell else []
        bos = self._inner.bos_token_id
        twice = bos is not None and tokens[:2] == [bos, bos]  # the text brings its own BOS
        return (tokens[1:], starts[1:]) if twice else (tokens, starts)

    def _closed(self, tokens: list[int]) -> np.ndarray:
        closed = bool(tokens) and tokens[-1] in self._stop_ids
        return np.array(tokens if closed else [*tokens, self._inner.eos_token_id], dtype=np.int32)


def shared_start(a: np.ndarray, b: np.ndarray) -> int:
    """Returns how many tokens (A,) and (B,) begin with in common."""
    size = min(len(a), len(b))
    differ = np.flatnonzero(a[:size] != b[:size])
    return int(differ[0]) if len(differ) else size


def _first_at(starts: list[int], seam: int) -> int:
    """Returns how many tokens surely end at or before the character `seam`.

    Told by the next token's start: some tokenizers leave white space out of where a token ends.
    """
    first = next((place for place, start in enumerate(starts) if start >= seam), None)
    if first is None:  # the last token holds some of the prompt, or nothing follows it
        return starts.index(max(starts)) if starts else 0
    reaches_over = first > 0 and starts[first] > seam  # perhaps the token before it does
    return first - reaches_over
