"""Where rows come from: what `data.train` and `data.valid` name, as sets of files and hub data sets."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from mlxft.config.choices import SET_KEYS
from mlxft.config.schema import DataConfig
from mlxft.data.files import BUNDLED, SUFFIXES, Cells, Raw, data_file, on_hub, path_of, suffix_of
from mlxft.data.json_row import parse_row
from mlxft.errors import InputError

_NEVER_TEXT = frozenset(
    ("messages", "conversations", "tools", "history", "label", "input_ids", "completion_mask", "choices")
    + ("prompt_ids", "chosen_ids", "rejected_ids", "completion_ids")
)
# A split by the names that files of a folder have, as data sets on the hub name them.
_SPLIT_NAMES = {"train": "train", "valid": "validation|valid|val|dev", "test": "test"}
_SPLIT_OF_FILE = re.compile(
    "|".join(f"(?P<{split}>{names})(?![a-z])" for split, names in _SPLIT_NAMES.items())
)


@dataclass(frozen=True)
class Row:
    """One row of a source. values: its values under our column names. where: "file:line" or the like."""

    values: dict[str, Any]
    where: str


class Part(Protocol):
    """A file of rows, or a split of a hub data set. A row's place is `name`, `unit` and its number."""

    name: str
    unit: str

    def rows(self) -> Iterator[tuple[int, Raw]]:
        """Yields (number, row), in order."""

    def num_bytes(self) -> int:
        """Returns how large it is."""

    def num_text_bytes(self) -> int | None:
        """Returns about how many bytes of text its rows are, None where that is not known beforehand."""

    def digest(self) -> str:
        """Returns what changes when its rows do."""


@dataclass(frozen=True)
class RowSet:
    """Rows of one format: files, a folder or a hub data set.

    paths: as the user wrote them. weight: its part in a mixture, None where nothing is mixed. split: of a
    hub data set or a folder, None for the usual one. fallback: the usual ones, the first that is there.
    """

    paths: tuple[str, ...]
    weight: float | None = None
    split: str | None = None
    revision: str | None = None
    subset: str | None = None
    columns: tuple[tuple[str, str], ...] = ()
    fallback: tuple[str, ...] = ("train",)

    @property
    def name(self) -> str:
        """What a report calls it."""
        return self.paths[0] if len(self.paths) == 1 else f"{self.paths[0]} and {len(self.paths) - 1} more"

    @property
    def is_on_hub(self) -> bool:
        """Whether any of it is a data set on the hub."""
        return any(on_hub(path) for path in self.paths)

    def parts(self, streaming: bool = False) -> list[Part]:
        """Returns the files and hub splits, in order. Raises: InputError for one that is not there."""
        return [part for path in self.paths for part in self._parts(path, streaming)]

    def rows(self) -> Iterator[Row]:
        """Yields every row, in order. Raises: InputError naming a file or row that is wrong."""
        for part in self.parts():
            number = 0
            for number, raw in part.rows():
                yield row_of(raw, f"{part.name}{part.unit}{number}", dict(self.columns))
            if not number:
                raise InputError(no_rows(part.name))

    def _parts(self, path: str, streaming: bool) -> list[Part]:
        if on_hub(path):
            from mlxft.data.hub import hub_split

            return [hub_split(path, self, streaming)]
        if path_of(path).is_dir():
            return [data_file(name) for name in self._files(path, path_of(path))]
        return [data_file(path)]

    def _files(self, name: str, folder: Path) -> list[str]:
        """Returns the files of a folder; where their names tell splits apart, those of one split."""
        files = sorted(
            path for path in folder.rglob("*")
            if path.is_file() and suffix_of(path) in SUFFIXES and not path.name.startswith(".")
        )  # fmt: skip
        if not files:
            raise InputError(f"{name}: the folder has no file that ends in {', '.join(SUFFIXES)} (or .gz).")
        splits: dict[str, list[str]] = {}
        for path in files:
            shown = str(Path(name) / path.relative_to(folder))
            splits.setdefault(_split_of(path.relative_to(folder)), []).append(shown)
        if set(splits) == {""}:
            if self.split is not None:
                raise InputError(f"{name}: no file's name says that it is of the split {self.split!r}.")
            return splits[""]
        wanted = (_SPLIT_ALIAS.get(self.split, self.split),) if self.split is not None else self.fallback
        for split in wanted:
            if split in splits:
                return splits[split]
        there = ", ".join(filter(None, splits))
        raise InputError(
            f"{name}: the names of its files tell splits apart ({there}), and none is {' or '.join(wanted)}. "
            "Name the files themselves, or give data.split."
        )


_SPLIT_ALIAS = {alias: split for split, names in _SPLIT_NAMES.items() for alias in names.split("|")}


def _split_of(path: Path) -> str:
    """Returns the split that a file's name, or its folder's, begins with; "" if none."""
    for word in (path.name, *(parent.name for parent in path.parents)):
        match = _SPLIT_OF_FILE.match(word.lower())
        if match:
            return match.lastgroup or ""
    return ""


def sets_of(source: Any, cfg: DataConfig, validates: bool = False) -> list[RowSet]:
    """Returns the sets that `data.train` or `data.valid` names: files without keys of their own are one set.

    validates: it is data.valid, whose usual split is the validation's.

    Raises: InputError for what is no name of a file, a list of names or sets.
    """
    usual = RowSet(
        (),
        split=None if validates else cfg.split,
        revision=cfg.revision,
        subset=cfg.subset,
        columns=tuple((cfg.columns or {}).items()),
        fallback=("valid", "test") if validates else ("train",),
    )
    entries = [source] if isinstance(source, (str, Path, Mapping)) else source
    if not isinstance(entries, Sequence):
        raise InputError(f"data: {source!r} is not a file name, a list of file names or {BUNDLED}NAME.")
    if not entries:
        raise InputError(f"data: the list of files is empty. Name a file of rows, or {BUNDLED}NAME.")
    if all(isinstance(entry, (str, Path)) for entry in entries):
        return [replace(usual, paths=tuple(map(str, entries)))]
    return [_set_of(entry, usual) for entry in entries]


def _set_of(entry: Any, usual: RowSet) -> RowSet:
    if isinstance(entry, (str, Path)):
        return replace(usual, paths=(str(entry),))
    if not isinstance(entry, Mapping) or "path" not in entry or entry.keys() - set(SET_KEYS):
        raise InputError(
            f"data: {entry!r} is no set of rows. Write a file's name, or {{path: NAME}} with any of "
            f"{', '.join(SET_KEYS[1:])}."
        )
    given = {key: value for key, value in entry.items() if key not in ("path", "columns")}
    if "columns" in entry:
        given["columns"] = tuple(entry["columns"].items())
    paths = entry["path"] if isinstance(entry["path"], list) else [entry["path"]]
    return replace(usual, paths=tuple(map(str, paths)), **given)


def first_row(source: Any, cfg: DataConfig) -> Row:
    """Returns the first row of `source`, as `data.train` may name it, without reading on.

    Raises: InputError.
    """
    first = sets_of(source, cfg)[0]
    return next(replace(first, paths=first.paths[:1]).rows())


def row_of(raw: Raw, where: str, columns: Mapping[str, str]) -> Row:
    """Returns a row as it stands in a file under our names; a mapped column wins over one of our name.

    Raises: InputError if it is text that is no JSON object, or could not be read.
    """
    if isinstance(raw, InputError):
        raise raw
    values = parse_row(raw, where) if isinstance(raw, bytes) else raw
    renamed = _renamed(values, columns) if columns else values
    return Row(_typed(renamed) if isinstance(raw, Cells) else renamed, where)


def _typed(cells: Mapping[str, str]) -> dict[str, Any]:
    """Returns a row of CSV with what is never text read as JSON; what is not JSON stays, to be refused."""
    values: dict[str, Any] = dict(cells)
    for key in _NEVER_TEXT & values.keys():
        text = values[key].strip()
        with suppress(ValueError, RecursionError):
            values[key] = json.loads(text.lower() if key == "label" else text or "null")
    return values


def no_rows(name: str) -> str:
    """Returns what is said of a file without rows."""
    return f"{name}: the file holds no rows. Write one JSON object a line."


def check_columns_exist(rows: RowSet, parts: Sequence[Part]) -> None:
    """Raises InputError when no row has a column that `data.columns` names; reads on until all are found."""
    wanted, keys = dict(rows.columns), {}
    missing = set(wanted.values())
    for part in parts if missing else ():
        for number, raw in part.rows():
            with suppress(InputError):  # a row's own faults are told when it is its turn
                values = row_of(raw, f"{part.name}{part.unit}{number}", {}).values
                missing -= values.keys()
                keys.update(dict.fromkeys(values))
            if not missing:
                return
    for ours, theirs in wanted.items():
        if theirs in missing:
            raise InputError(
                f"data.columns.{ours}: no row of {', '.join(part.name for part in parts)} has a column "
                f"{theirs!r}. The columns are: {', '.join(keys)}."
            )


def _renamed(values: dict, columns: Mapping[str, str]) -> dict:
    taken = {ours: values[theirs] for ours, theirs in columns.items() if theirs in values}
    sources = set(columns.values())
    rest = {key: value for key, value in values.items() if key not in sources and key not in columns}
    return rest | taken
