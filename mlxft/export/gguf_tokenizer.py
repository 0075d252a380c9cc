"""A tokenizer's vocabulary as GGUF files have it, from tokenizer.json.

Source: the GGUF specification (ggml-org/ggml, docs/gguf.md), section "Tokenizer".
"""

from pathlib import Path
from typing import Any, Optional

from mlxft.errors import InputError
from mlxft.models import audit

# tokenizer.ggml.token_type
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = range(1, 7)

# How text is cut before byte pairs are merged, by llama.cpp's name of it: the pattern of the Split in
# tokenizer.json, as the models of that name have it.
_PATTERNS = {
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+": "llama-bpe",
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+": "qwen2",
}


def vocabulary(folder: Path, tokenizer: Any, size: int) -> dict[str, Any]:
    """Returns the fields tokenizer.ggml.* and chat_template (without the prefix) of the model in `folder`.

    tokenizer: mlx-lm's wrapper. size: of the embedding; ids that no token has are filled up.

    Raises: InputError for a tokenizer that GGUF has no name for.
    """
    file = folder / "tokenizer.json"
    if tokenizer is None or not file.is_file():
        raise InputError(f"to=gguf: {folder} has no tokenizer.json, and a GGUF model has its tokenizer in it")
    content = audit.read_json(file)
    model = content.get("model") or {}
    if model.get("type") != "BPE":
        raise InputError(
            f"{file}: a tokenizer of type {model.get('type')} is not written as GGUF here, only BPE"
        )
    tokens, types = _tokens(content, size)
    fields: dict[str, Any] = {"tokens": tokens, "token_type": types}
    merges = [merge.split(" ") if isinstance(merge, str) else merge for merge in model["merges"]]
    if _is_byte_level(content):
        fields |= {"model": "gpt2", "pre": _cut(content, bool(merges), file)}
        # llama.cpp wants one merge at least. "!!" is no token where there are none, so it is two again.
        fields["merges"] = [" ".join(merge) for merge in merges or [("!", "!")]]
    elif model.get("byte_fallback"):
        # Pieces are merged likeliest first: the earlier a merge stands in the list, the higher its score.
        scores = {token: 0.0 for token in tokens}
        for rank, (left, right) in reversed(list(enumerate(merges))):
            scores[left + right] = -float(rank)
        fields |= {"model": "llama", "pre": "default", "scores": [scores[token] for token in tokens]}
        fields["add_space_prefix"] = _adds_space(content)
    else:
        raise InputError(f"{file}: bytes are neither its alphabet nor its fallback; not written as GGUF here")
    return fields | _specials(tokenizer)


def _tokens(content: dict[str, Any], size: int) -> tuple[list[str], list[int]]:
    tokens = [f"[PAD{number}]" for number in range(size)]
    types = [_UNUSED] * size
    model = content["model"]
    for token, number in model["vocab"].items():
        if number < size:
            tokens[number] = token
            is_byte = model.get("byte_fallback") and len(token) == 6 and token.startswith("<0x")
            types[number] = _BYTE if is_byte else _NORMAL
    for added in content.get("added_tokens") or []:
        if added["id"] < size:
            tokens[added["id"]] = added["content"]
            types[added["id"]] = _CONTROL if added["special"] else _USER_DEFINED
    if model.get("unk_token") in tokens:
        types[tokens.index(model["unk_token"])] = _UNKNOWN
    return tokens, types


def _steps(content: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns what cuts text before merging, one step after another."""
    step = content.get("pre_tokenizer") or {}
    return step.get("pretokenizers", [step] if step else [])


def _is_byte_level(content: dict[str, Any]) -> bool:
    return any(step.get("type") == "ByteLevel" for step in _steps(content))


def _cut(content: dict[str, Any], merges: bool, file: Path) -> str:
    """Returns llama.cpp's name of how text is cut before byte pairs are merged."""
    if not merges:
        return "gpt-2"  # every byte is a token, however text is cut
    kinds = []
    for step in _steps(content):
        if step["type"] == "Split":
            kinds.append(_PATTERNS.get((step.get("pattern") or {}).get("Regex")))
        elif step["type"] == "Digits":
            kinds.append("digits" if step.get("individual_digits") else None)
        elif step["type"] != "ByteLevel":
            kinds.append(None)
        elif step.get("use_regex", True):
            kinds.append("words")
    known = {("words",): "gpt-2", ("digits", "words"): "smollm"} | {
        (name,): name for name in _PATTERNS.values()
    }
    if tuple(kinds) not in known:
        raise InputError(
            f"{file}: how its pre_tokenizer cuts text has no name here that llama.cpp knows. Export with "
            "to=merged; llama.cpp's own converter may know it"
        )
    return known[tuple(kinds)]


def _adds_space(content: dict[str, Any]) -> bool:
    steps = (content.get("normalizer") or {}).get("normalizers") or [content.get("normalizer") or {}]
    return any(step.get("type") == "Prepend" for step in steps) or any(
        step.get("type") == "Metaspace" and step.get("prepend_scheme", "always") != "never"
        for step in _steps(content)
    )


def _specials(tokenizer: Any) -> dict[str, Any]:
    inner = getattr(tokenizer, "_tokenizer", tokenizer)
    fields = {}
    for ours, theirs in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        number: Optional[int] = getattr(inner, f"{ours}_token_id", None)
        if number is not None:
            fields[f"{theirs}_token_id"] = number
    ids = inner("a")["input_ids"]
    fields["add_bos_token"] = bool(ids) and ids[0] == inner.bos_token_id
    fields["add_eos_token"] = bool(ids) and ids[-1] == inner.eos_token_id
    template = getattr(inner, "chat_template", None)
    return fields | ({"chat_template": template} if isinstance(template, str) else {})
