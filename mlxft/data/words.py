"""Tokens of plain ASCII texts, word by word: a word's tokens are asked of the library once, then remembered.

Vocabularies of bytes are applied to words that a pattern cuts out, each word for itself, and texts are made
of few words that come again and again. The patterns of the library's pre-tokenizers mean the same to Python's
`re` as long as the text is ASCII. Where anything of a tokenizer may be of another kind there are no `Words`.
"""

import re
from collections.abc import Callable
from typing import Any, Optional

import numpy as np

_KEPT = 100_000  # words
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"  # ByteLevel's own
_ASCII = {r"\p{L}": "A-Za-z", r"\p{N}": "0-9"}
# What ByteLevel writes for each ASCII character: those that cannot be seen are moved up.
_LETTERS = {byte: 256 + min(byte, 33) for byte in (*range(33), 127)}

# Encoded both ways before a tokenizer's words are trusted.
_TRIED = (
    "Hello there, it's 2024:  three   spaces\n\n\nand a tab\t.  5 6  77 x1y2\r\n  end ",
    "don't DON'T we'll 'twas I'm  'S ''s a's' [x]{y}(z) <|a|> </s> <s> #$%^&* ___ --- ... ?!",
    "def f(x):\n    return x ** 2  # 1_000\n\n\tif not x: \\n \\\\ \x00\x1c\x1f\x7f\x0b\x0c e",
    " ",
    "\n",
    "a",
    "",
)

Cut = Callable[[str], list[str]]


class Words:
    """Encodes ASCII texts without special tokens of the tokenizer's own. Made by `words_of`."""

    def __init__(self, backend: Any, added: dict[str, int], cuts: list[Cut]):
        self._model = backend.model
        self._added = added
        longest_first = sorted(added, key=len, reverse=True)
        self._split = re.compile(f"({'|'.join(map(re.escape, longest_first))})").split if added else None
        self._cuts = cuts
        self._known: dict[str, list[int]] = {}

    def __call__(self, text: str) -> np.ndarray:
        """Returns the tokens (T,) int32 of a text of ASCII characters."""
        ids: list[int] = []
        known = self._known
        for place, part in enumerate(self._split(text) if self._split else [text]):
            if place % 2:
                ids.append(self._added[part])
                continue
            words = [part] if part else []
            for cut in self._cuts:
                words = [piece for word in words for piece in cut(word)]
            for word in words:
                found = known.get(word)
                if found is None:
                    found = self._learn(word)
                ids += found
        return np.array(ids, np.int32)

    def _learn(self, word: str) -> list[int]:
        if len(self._known) >= _KEPT:
            self._known.clear()
        found = [token.id for token in self._model.tokenize(word.translate(_LETTERS))]
        self._known[word] = found
        return found


def words_of(backend: Any, pre_tokenizers: list[dict]) -> Optional[Words]:
    """Returns how a tokenizer encodes ASCII texts, None for one that may do it in another way.

    backend: the Rust tokenizer, of a vocabulary of bytes, with no normaliser that changes ASCII texts.
    pre_tokenizers: what its pre-tokenizers say of themselves.
    """
    added = list(backend.get_added_tokens_decoder().items())
    if backend.encode_special_tokens or len({token.normalized for _, token in added}) > 1:
        return None
    if any(token.lstrip or token.rstrip or token.single_word or not token.content for _, token in added):
        return None
    cuts = [_cut_of(part) for part in pre_tokenizers]
    if any(cut is None for cut in cuts):
        return None
    ids = {token.content: id for id, token in added}
    words = Words(backend, ids, [cut for cut in cuts if cut is not _whole])
    tried = [*_TRIED, *(f"a {content}b{content} c" for content in list(ids)[:20] if content.isascii())]
    for text in tried:
        if words(text).tolist() != backend.encode(text, add_special_tokens=False).ids:
            return None
    return words


def _cut_of(part: dict) -> Optional[Cut]:
    """Returns how a pre-tokenizer cuts an ASCII text, None for one that is not known."""
    kind = part["type"]
    if kind == "Digits":
        return re.compile("[0-9]|[^0-9]+" if part["individual_digits"] else "[0-9]+|[^0-9]+").findall
    if kind == "ByteLevel" and not part["add_prefix_space"]:
        return _matches(_GPT2) if part["use_regex"] else _whole
    if kind == "Split" and part["behavior"] == "Isolated" and not part["invert"]:
        pattern = part["pattern"].get("Regex")
        return _matches(pattern) if pattern else None
    return None


def _whole(word: str) -> list[str]:
    return [word]


def _matches(pattern: str) -> Optional[Cut]:
    """Returns the pattern's matches and what lies between, None for a pattern `re` may read differently."""
    for name, characters in _ASCII.items():
        in_class = re.compile(r"(\[[^\]]*)" + re.escape(name))
        while in_class.search(pattern):
            pattern = in_class.sub(lambda found, by=characters: found[1] + by, pattern)
        pattern = pattern.replace(name, f"[{characters}]")
    if re.search(r"\\[pPXRKGhHdDwWbB]|\(\?[^:!=i]|\[\[|&&", pattern):
        return None
    try:
        compiled = re.compile(pattern, re.ASCII)
    except re.error:
        return None
    if compiled.groups or compiled.match(""):
        return None

    def cut(word: str) -> list[str]:
        found = compiled.findall(word)
        if sum(map(len, found)) == len(word):
            return found
        pieces, end = [], 0
        for match in compiled.finditer(word):
            pieces += [word[end : match.start()], match.group()]
            end = match.end()
        return [piece for piece in [*pieces, word[end:]] if piece]

    return cut
