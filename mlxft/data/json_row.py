"""The JSON text of one row, with all that would be lost or changed in silence refused."""

import json
from typing import Any

from mlxft.errors import InputError


def decoded(raw: bytes, where: str) -> str:
    """Returns a line's text. Raises InputError if it is not UTF-8."""
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InputError(
            f"{where}: not UTF-8 (byte {error.start + 1} of the line is 0x{raw[error.start]:02x}). "
            "Save the file as UTF-8."
        ) from None


def parse_row(raw: bytes, where: str) -> dict[str, Any]:
    """Returns the object that `raw` is. Raises InputError for anything else, naming what and where."""
    text = decoded(raw, where)
    try:
        values = json.loads(text, object_pairs_hook=_without_doubles)
    except _Double as double:
        raise InputError(f"{where}: the key {double} stands twice in one object. Keep one of them.") from None
    except json.JSONDecodeError as error:
        hint = ""
        if text in ("{", "[", "[{"):
            hint = " A row must stand on one line; turn the file into JSON lines: jq -c '.[]' or jq -c '.'."
        raise InputError(f"{where}: not JSON ({error.msg} at character {error.pos + 1}).{hint}") from None
    except (ValueError, RecursionError) as error:
        raise InputError(f"{where}: not usable JSON ({error}).") from None
    if isinstance(values, list):
        raise InputError(
            f"{where}: a JSON list, not an object. Write each row as an object on a line of its own: "
            "jq -c '.[]' file.json > file.jsonl."
        )
    if not isinstance(values, dict):
        raise InputError(f'{where}: {kind_of(values)}, not an object. A row looks like {{"text": "..."}}.')
    if "\\ud" in text.lower():
        _check_surrogates(values, where)
    return values


def kind_of(value: Any) -> str:
    """Returns what a value of a row is, in words for a message."""
    if isinstance(value, list):
        return "a list" if value else "an empty list"
    names = {str: "text", dict: "an object", bool: "true or false", int: "a number", float: "a number"}
    return "null" if value is None else names.get(type(value), f"a {type(value).__name__}")


class _Double(Exception):
    """A key that an object has twice: JSON readers keep the last and drop the rest in silence."""


def _without_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        seen: set[str] = set()
        raise _Double(next(repr(key) for key, _ in pairs if key in seen or seen.add(key)))
    return values


def _check_surrogates(values: dict, where: str) -> None:
    try:
        json.dumps(values, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError as error:
        half = ord(error.object[error.start])
        raise InputError(
            f"{where}: \\u{half:04x} is half of a character (a surrogate without its partner). "
            "Write the character whole, or leave it out."
        ) from None
