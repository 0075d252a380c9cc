"""Texts to tokens, many at once, with the characters that each token stands for.

The tokens are those of the tokenizer itself. Most of its time it spends on describing each token, so for
vocabularies of bytes (GPT-2's kind) the characters are counted here from the lengths of the tokens' own
bytes, and words that were seen before are remembered.
"""

import json
import unicodedata
from dataclasses import dataclass
from typing import Any, Optional

import numpy as np

from mlxft.data.words import Words, words_of

_NEVER = 1 << 40  # bytes of a token whose bytes are not known: the sum then cannot be right


@dataclass(frozen=True)
class Tokens:
    """ids: (T,) int32. offsets: (T, 2), the characters each begins and ends at; None if not asked for."""

    ids: np.ndarray
    offsets: Optional[np.ndarray]


class Tokeniser:
    """Encodes texts with one of transformers' tokenizers.

    can_tell: whether it knows which characters a token stands for.
    """

    def __init__(self, tokenizer: Any):
        self._inner = tokenizer
        self.can_tell = tokenizer.is_fast
        self._backend = _plain_backend(tokenizer)
        self._num_bytes = _byte_lengths(self._backend) if self._backend is not None else None
        self._words: Optional[Words] = None
        if self._num_bytes is not None:
            self._words = words_of(self._backend, _parts(self._backend.pre_tokenizer, "pretokenizers"))
        self._normalises = self._backend is not None and self._backend.normalizer is not None

    def __call__(self, texts: list[str], special: bool, offsets: bool) -> list[Tokens]:
        """Returns each text's tokens. special: whether the tokenizer adds its own, such as BOS."""
        if not texts:
            return []
        if self._backend is None:
            return [self._by_tokenizer(text, special, offsets) for text in texts]
        counts = offsets and not special and self._num_bytes is not None
        if counts or not offsets:
            ids = self._ids(texts, special)
            if not offsets:
                return [Tokens(each, None) for each in ids]
            return [Tokens(each, self._counted(text, each)) for text, each in zip(texts, ids, strict=True)]
        encodings = self._backend.encode_batch(texts, add_special_tokens=special)
        return [Tokens(np.array(each.ids, np.int32), _pairs(each.offsets)) for each in encodings]

    def _ids(self, texts: list[str], special: bool) -> list[np.ndarray]:
        words = None if special else self._words
        left = [text for text in texts if words is None or not text.isascii()]
        encodings = iter(self._backend.encode_batch_fast(left, add_special_tokens=special))
        return [
            words(text)
            if words is not None and text.isascii()
            else np.array(next(encodings).ids, np.int32)
            for text in texts
        ]

    def _by_tokenizer(self, text: str, special: bool, offsets: bool) -> Tokens:
        offsets = offsets and self.can_tell
        encoded = self._inner(
            text, add_special_tokens=special, return_offsets_mapping=offsets, verbose=False
        )
        pairs = _pairs(encoded["offset_mapping"]) if offsets else None
        return Tokens(np.array(encoded["input_ids"], np.int32), pairs)

    def _counted(self, text: str, ids: np.ndarray) -> np.ndarray:
        """Returns the offsets (T, 2), counted where the tokens' bytes are the text's."""
        raw = text.encode()
        lengths = self._num_bytes[ids]
        ends = lengths.cumsum()
        is_whole = len(ids) > 0 and int(ends[-1]) == len(raw)
        if not is_whole or (self._normalises and not unicodedata.is_normalized("NFC", text)):
            return _pairs(self._backend.encode(text, add_special_tokens=False).offsets)
        starts = ends - lengths
        if len(raw) == len(text):
            return np.stack([starts, ends], axis=1)
        # A token that holds some bytes of a character stands for all of it.
        place = ((np.frombuffer(raw, np.uint8) & 0xC0) != 0x80).cumsum()
        return np.stack([place[starts] - 1, place[ends - 1]], axis=1)


def _pairs(offsets: list[tuple[int, int]]) -> np.ndarray:
    return np.array(offsets, dtype=np.int64).reshape(-1, 2)


def _plain_backend(tokenizer: Any) -> Any:
    """Returns the Rust tokenizer where calling `tokenizer` does nothing but call it, else None."""
    if not tokenizer.is_fast:
        return None
    from transformers import PreTrainedTokenizerFast

    for name in ("__call__", "_encode_plus"):
        if getattr(type(tokenizer), name) is not getattr(PreTrainedTokenizerFast, name):
            return None
    backend = tokenizer.backend_tokenizer
    backend.no_truncation()
    backend.no_padding()
    backend.encode_special_tokens = bool(tokenizer.split_special_tokens)
    return backend


def _byte_lengths(backend: Any) -> Optional[np.ndarray]:
    """Returns the number of bytes of each token (V,), None for a vocabulary that is not made of bytes."""
    from tokenizers import models, pre_tokenizers

    model, alphabet = backend.model, set(pre_tokenizers.ByteLevel.alphabet())
    parts = _parts(backend.pre_tokenizer, "pretokenizers")
    is_plain = isinstance(model, models.BPE) and not (
        model.dropout or model.continuing_subword_prefix or model.end_of_word_suffix or model.byte_fallback
    )
    bytewise = [part for part in parts if part["type"] == "ByteLevel"]
    normal = _parts(backend.normalizer, "normalizers")
    trims = [part for part in _parts(backend.post_processor, "processors") if part["type"] == "ByteLevel"]
    if not is_plain or trims or any(part["type"] != "NFC" for part in normal):
        return None
    vocabulary = backend.get_vocab(with_added_tokens=False)
    if len(bytewise) != 1 or bytewise[0]["add_prefix_space"]:
        return None
    added = backend.get_added_tokens_decoder()
    lengths = np.full(max([*vocabulary.values(), *added]) + 1, _NEVER, np.int64)
    for piece, token in vocabulary.items():
        if alphabet.issuperset(piece):
            lengths[token] = len(piece)
    for token, content in added.items():
        lengths[token] = len(content.content.encode())
    if model.unk_token in vocabulary:
        lengths[vocabulary[model.unk_token]] = _NEVER
    return lengths


def _parts(component: Any, inside: str) -> list[dict]:
    """Returns what a part of the tokenizer says of itself, those in a sequence one by one."""
    if component is None:
        return []
    state = json.loads(component.__getstate__())
    if state["type"] != "Sequence":
        return [state]
    return state[inside]
