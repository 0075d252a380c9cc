"""Tokens and masks for rows without a chat template: prompt and completion, and plain text."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from mlxft.data.formats import CompletionRow, TextRow
from mlxft.data.template import huggingface_tokenizer, stop_token_ids
from mlxft.data.tokenise import Tokeniser, Tokens
from mlxft.errors import InputError

Encoded = tuple[np.ndarray, np.ndarray]  # tokens (T,) int32, mask (T,) bool


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
        self._tokenise = Tokeniser(self._inner)
        if self._inner.eos_token_id is None:
            raise InputError(
                "The model's tokenizer has no end-of-sequence token, so text could not teach where to stop. "
                "Set eos_token in its tokenizer_config.json, or give rows of tokens (data.format=tokens)."
            )

    def encode_all(self, rows: Sequence[CompletionRow | TextRow], train_on: str) -> list[Encoded]:
        """Returns (tokens (T,) int32, mask (T,) bool) of each row.

        A completion row is prompt + completion + end of sequence. The two are joined as they stand and
        encoded as one text; a token across the seam belongs to the completion. The completion and the end
        of sequence are trained; with train_on "all" the prompt too. A text is trained whole.
        """
        pairs = [row for row in rows if isinstance(row, CompletionRow)]
        joined = iter(self._encode([row.prompt + row.completion for row in pairs], offsets=True))
        prompts = iter(self._encode([row.prompt for row in pairs if train_on != "all"]))
        texts = iter(self._encode([row.text for row in rows if isinstance(row, TextRow)]))
        encoded = []
        for row in rows:
            if isinstance(row, TextRow) or train_on == "all":
                tokens = self._closed(next(texts if isinstance(row, TextRow) else joined).ids)
                encoded.append((tokens, np.ones(len(tokens), dtype=bool)))
            else:
                encoded.append(self._completion(next(joined), next(prompts).ids, len(row.prompt)))
        return encoded

    def _completion(self, joined: Tokens, prompt: np.ndarray, seam: int) -> Encoded:
        """Returns tokens and mask of a prompt with its completion, which begins at the character `seam`."""
        tokens = self._closed(joined.ids)
        mask = np.ones(len(tokens), dtype=bool)
        starts = joined.offsets[:, 0].tolist() if joined.offsets is not None else []
        # What the prompt alone begins with too; by offsets more, where merges reach back over the seam.
        mask[: max(shared_start(prompt, tokens[:-1]), _first_at(starts, seam))] = False
        return tokens, mask

    def _encode(self, texts: list[str], offsets: bool = False) -> list[Tokens]:
        """Returns the texts' tokens, and the characters they are, if that is asked and can be told."""
        bos = self._inner.bos_token_id
        encoded = []
        for each in self._tokenise(texts, special=True, offsets=offsets):
            twice = bos is not None and each.ids[:2].tolist() == [bos, bos]  # the text brings its own BOS
            if twice:
                each = Tokens(each.ids[1:], each.offsets[1:] if each.offsets is not None else None)
            encoded.append(each)
        return encoded

    def _closed(self, tokens: np.ndarray) -> np.ndarray:
        closed = len(tokens) > 0 and int(tokens[-1]) in self._stop_ids
        return tokens if closed else np.append(tokens, np.int32(self._inner.eos_token_id))


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
