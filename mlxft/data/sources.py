"""Reads data files of JSON lines, keeping for each row the file and the line it came from.

The rows are held by the `datasets` library as their own JSON text beside their place. Typed columns
would change them: Arrow gives every row the keys of all the others and refuses a key whose values
differ in type. In memory, so nothing is written to a cache and no progress bar is drawn.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlxft.errors import InputError
from mlxft.resources import bundled_data

BUNDLED = "bundled:"
_BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True)
class Row:
    """One line of a data file. values: its JSON object under our column names. where: "file:line"."""

    values: dict[str, Any]
    where: str


class Rows:
    """The rows of one or more files, in order, parsed anew each time they are gone through."""

    def __init__(self, dataset, names: list[str], columns: dict[str, str]):
        self._dataset = dataset
        self._names = names
        self._columns = columns

    def __len__(self) -> int:
        return len(self._dataset)

    def __iter__(self) -> Iterator[Row]:
        for held in self._dataset:
            where = f"{self._names[held['file']]}:{held['line']}"
            yield Row(_rename(json.loads(held["row"]), self._columns), where)


def read_rows(source: Any, columns: dict[str, str] | None = None) -> Rows:
    """Returns every row of `source`: a file of JSON lines, a list of such files, or "bundled:NAME".

    columns: {our name: the file's name}. Blank lines are passed over.

    Raises:
        InputError: a file that is missing or empty; a line that is not UTF-8, not JSON or not an
            object; a column that no row has. The text names the file and the line.
    """
    from datasets import Dataset, Features, Value  # a second to import

    names = _file_names(source)
    held: dict[str, list] = {"file": [], "line": [], "row": []}
    keys: dict[str, None] = {}  # a set that keeps the order of first sight
    for index, name in enumerate(names):
        before = len(held["row"])
        for line, text, values in _read_lines(name):
            held["file"].append(index)
            held["line"].append(line)
            held["row"].append(text)
            keys.update(dict.fromkeys(values))
        if len(held["row"]) == before:
            raise InputError(_no_rows(name))
    columns = dict(columns or {})
    _check_columns(columns, list(keys), names)
    features = Features({"file": Value("int32"), "line": Value("int64"), "row": Value("large_string")})
    return Rows(Dataset.from_dict(held, features=features), names, columns)


def first_row(source: Any, columns: dict[str, str] | None = None) -> Row:
    """Returns the first row of `source` without reading on; arguments and errors as `read_rows`."""
    name = _file_names(source)[0]
    for line, _, values in _read_lines(name):
        return Row(_rename(values, dict(columns or {})), f"{name}:{line}")
    raise InputError(_no_rows(name))


def _no_rows(name: str) -> str:
    return f"{name}: the file holds no rows. Write one JSON object a line."


def _file_names(source: Any) -> list[str]:
    """Returns the names of the files as the user wrote them."""
    if isinstance(source, (str, Path)):
        source = [source]
    if not isinstance(source, Sequence) or not all(isinstance(name, (str, Path)) for name in source):
        raise InputError(f"data: {source!r} is not a file name, a list of file names or {BUNDLED}NAME.")
    if not source:
        raise InputError(f"data: the list of files is empty. Name a file of JSON lines, or {BUNDLED}NAME.")
    return [str(name) for name in source]


def _open_bytes(name: str):
    path = bundled_data(name.removeprefix(BUNDLED)) if name.startswith(BUNDLED) else Path(name).expanduser()
    if path.is_dir():
        raise InputError(f"{name}: is a folder. Name the file or the files in it.")
    try:
        return path.open("rb")
    except OSError as error:
        hint = "Check the path in data.train or data.valid; it is taken from the folder you run in."
        if name.startswith(BUNDLED):
            bundled = sorted(p.name for p in path.parent.glob("*.jsonl"))
            hint = f"Bundled are: {', '.join(bundled) or 'none'}."
        raise InputError(f"{name}: cannot be read ({error.strerror}). {hint}") from None


def _read_lines(name: str) -> Iterator[tuple[int, str, dict]]:
    """Yields (line number from 1, text, object) of each line that is not blank."""
    with _open_bytes(name) as file:
        for line, raw in enumerate(file, start=1):  # bytes break at \n only; text would break at U+2028 too
            if line == 1:
                raw = raw.removeprefix(_BOM)
            raw = raw.strip()  # bytes: of ASCII white space only
            if not raw:
                continue
            where = f"{name}:{line}"
            try:
                text = raw.decode("utf-8")
            except UnicodeDecodeError as error:
                raise InputError(
                    f"{where}: not UTF-8 (byte {error.start + 1} of the line is 0x{raw[error.start]:02x}). "
                    "Save the file as UTF-8."
                ) from None
            yield line, text, _parse(text, where)


class _Double(Exception):
    """A key that an object has twice: JSON readers keep the last and drop the rest in silence."""


def _without_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        seen: set[str] = set()
        raise _Double(next(repr(key) for key, _ in pairs if key in seen or seen.add(key)))
    return values


def _parse(text: str, where: str) -> dict:
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


def _check_surrogates(values: dict, where: str) -> None:
    try:
        json.dumps(values, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError as error:
        half = ord(error.object[error.start])
        raise InputError(
            f"{where}: \\u{half:04x} is half of a character (a surrogate without its partner). "
            "Write the character whole, or leave it out."
        ) from None


def kind_of(value: Any) -> str:
    """Returns what a JSON value is, in words for a message."""
    if isinstance(value, list):
        return "a list" if value else "an empty list"
    names = {str: "text", dict: "an object", bool: "true or false", int: "a number", float: "a number"}
    return "null" if value is None else names[type(value)]


def _check_columns(columns: dict[str, str], keys: list[str], names: list[str]) -> None:
    for ours, theirs in columns.items():
        if theirs not in keys:
            raise InputError(
                f"data.columns.{ours}: no row of {', '.join(names)} has a column {theirs!r}. "
                f"The columns are: {', '.join(keys)}."
            )


def _rename(values: dict, columns: dict[str, str]) -> dict:
    """Returns the row under our names; a mapped column wins over one that has our name already."""
    if not columns:
        return values
    taken = {ours: values[theirs] for ours, theirs in columns.items() if theirs in values}
    sources = set(columns.values())
    rest = {key: value for key, value in values.items() if key not in sources and key not in columns}
    return rest | taken
