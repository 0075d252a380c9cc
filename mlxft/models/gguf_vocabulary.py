"""The tokenizer in a GGUF file as the content of tokenizer.json.

Source: the GGUF specification (ggml-org/ggml, docs/gguf.md), section "Tokenizer", for names and types.
"""

from collections.abc import Iterator
from typing import Any

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4  # tokenizer.ggml.token_type

_WORDS = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|DIGITS| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
          r"|\s+(?!\S)|\s+")  # fmt: skip


def _split(digits: str) -> list[dict[str, Any]]:
    pattern = {"Regex": _WORDS.replace("DIGITS", digits)}
    return [{"type": "Split", "pattern": pattern, "behavior": "Isolated", "invert": False}]


# How text is cut before byte pairs are merged, by llama.cpp's name of it. After these come the words of
# GPT-2, if there is no pattern among them.
_CUTS = {
    "gpt-2": [],
    "smollm": [{"type": "Digits", "individual_digits": True}],
    "llama-bpe": _split(r"\p{N}{1,3}"),
    "qwen2": _split(r"\p{N}"),
}


class Unconvertible(Exception):
    """What in the file has no counterpart, as a sentence."""


def tokenizer_of(fields: dict[str, Any]) -> dict[str, Any]:
    """Returns the content of tokenizer.json. Raises: KeyError for a missing field; Unconvertible."""
    kind, cut = fields["tokenizer.ggml.model"], fields.get("tokenizer.ggml.pre", "default")
    if kind == "llama":
        return _whole(fields, _pieces(fields))
    if kind == "gpt2" and cut in _CUTS:
        return _whole(fields, _byte_pairs(fields, cut))
    known = ", ".join(f"(gpt2, {name})" for name in _CUTS)
    raise Unconvertible(f"its tokenizer ({kind}, {cut}) cannot be converted, only {known} and llama")


def _whole(fields: dict[str, Any], made: dict[str, Any]) -> dict[str, Any]:
    tokens, types = fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.token_type"]
    never = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    added = [{"id": index, "content": tokens[index], **never, "special": type_ != _USER_DEFINED}
             for index, type_ in enumerate(types)
             if type_ in (_CONTROL, _USER_DEFINED, _UNKNOWN)]  # fmt: skip
    return {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": added,
        "post_processor": _beginning(fields, tokens) or made.pop("post_processor", None), **made,
    }  # fmt: skip


def _beginning(fields: dict[str, Any], tokens: list[str]) -> dict[str, Any] | None:
    """Returns what writes the beginning-of-text token before each text, None where nothing does."""
    index = fields.get("tokenizer.ggml.bos_token_id")
    default = fields["tokenizer.ggml.model"] == "llama" or fields.get("tokenizer.ggml.pre") == "llama-bpe"
    if index is None or not fields.get("tokenizer.ggml.add_bos_token", default):
        return None
    bos = tokens[index]

    def text(name: str, type_id: int) -> list[dict[str, Any]]:
        first = {"SpecialToken": {"id": bos, "type_id": type_id}}
        return [first, {"Sequence": {"id": name, "type_id": type_id}}]

    special = {bos: {"id": bos, "ids": [index], "tokens": [bos]}}
    return {"type": "TemplateProcessing", "single": text("A", 0), "pair": text("A", 0) + text("B", 1),
            "special_tokens": special}  # fmt: skip


def _byte_pairs(fields: dict[str, Any], cut: str) -> dict[str, Any]:
    has_pattern = any(step["type"] == "Split" for step in _CUTS[cut])
    by_bytes = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True,
                "use_regex": not has_pattern}  # fmt: skip
    return {
        "normalizer": {"type": "NFC"} if cut == "qwen2" else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [*_CUTS[cut], by_bytes]},
        "decoder": by_bytes | {"use_regex": True},
        "model": _model(fields["tokenizer.ggml.tokens"],
                        _known(fields["tokenizer.ggml.merges"], set(fields["tokenizer.ggml.tokens"])),
                        ignore_merges=cut == "llama-bpe"),
    }  # fmt: skip


def _known(merges: list[str], tokens: set[str]) -> list[list[str]]:
    """Returns the merges, as pairs, that make a token: some files have others, which join nothing."""
    pairs = [merge.split(" ", 1) for merge in merges]
    return [pair for pair in pairs if "".join(pair) in tokens]


def _pieces(fields: dict[str, Any]) -> dict[str, Any]:
    """A vocabulary of pieces with scores: those that score highest are put together first."""
    tokens, scores = fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.scores"]
    adds_space = fields.get("tokenizer.ggml.add_space_prefix", True)
    spaces = [{"type": "Replace", "pattern": {"String": " "}, "content": "▁"}]
    prefix = [{"type": "Prepend", "prepend": "▁"}] if adds_space else []
    back = [{"type": "Replace", "pattern": {"String": "▁"}, "content": " "}, {"type": "ByteFallback"},
            {"type": "Fuse"}]  # fmt: skip
    back += [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if adds_space else []
    unknown = fields.get("tokenizer.ggml.unknown_token_id")
    return {
        "normalizer": {"type": "Sequence", "normalizers": prefix + spaces},
        "pre_tokenizer": None,
        "decoder": {"type": "Sequence", "decoders": back},
        "model": _model(tokens, list(_merges(tokens, scores, fields["tokenizer.ggml.token_type"])),
                        byte_fallback=True, fuse_unk=True,
                        unk_token=None if unknown is None else tokens[unknown]),
    }  # fmt: skip


def _merges(tokens: list[str], scores: list[float], types: list[int]) -> Iterator[list[str]]:
    """Yields the pairs of pieces that make another, the highest score first; ties as they stand."""
    index = {token: place for place, token in enumerate(tokens)}
    joined = [place for place, type_ in enumerate(types)
              if type_ in (_NORMAL, _USER_DEFINED) and len(tokens[place]) > 1]  # fmt: skip
    for place in sorted(joined, key=lambda place: -scores[place]):
        token = tokens[place]
        halves = [(token[:n], token[n:]) for n in range(1, len(token))]
        known = [half for half in halves if half[0] in index and half[1] in index]
        yield from (list(half) for half in sorted(known, key=lambda half: (index[half[0]], index[half[1]])))


def _model(tokens: list[str], merges: list[list[str]], **changes: Any) -> dict[str, Any]:
    return {
        "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": "",
        "end_of_word_suffix": "", "fuse_unk": False, "byte_fallback": False, "ignore_merges": False,
        "vocab": {token: index for index, token in enumerate(tokens)}, "merges": merges, **changes,
    }  # fmt: skip
