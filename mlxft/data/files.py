"""Rows as they stand in files: JSON lines, a JSON list, CSV and Parquet, one after the other.

A row of JSON lines stays text until it is wanted. Nothing is put into typed columns on the way: those
give every row the keys of all the others and refuse a key whose values differ in type.
"""

import codecs
import csv
import gzip
import hashlib
import json
import re
import stat
import sys
import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, ClassVar

from mlxft.data.json_row import decoded
from mlxft.errors import InputError
from mlxft.resources import bundled_data

BUNDLED = "bundled:"
SUFFIXES = (".jsonl", ".json", ".csv", ".parquet")  # of files that a folder's rows are read from; also .gz

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_BOM = b"\xef\xbb\xbf"
_READ_BYTES = 1 << 20
_WHITE = re.compile(r"[ \t\n\r]*")
_PARQUET_ROWS = 1024  # decoded at once

# A row as JSON text, its values, or why it cannot be read.
Raw = bytes | dict[str, Any] | InputError


class Cells(dict):
    """A row of CSV by its columns: every value is text."""


@dataclass(frozen=True)
class DataFile(ABC):
    """A file of rows. name: as the user wrote it. unit: what stands between it and a row's number."""

    name: str
    unit: ClassVar[str] = ":"

    @property
    def path(self) -> Path:
        """Where the file is."""
        return path_of(self.name)

    @abstractmethod
    def rows(self) -> Iterator[tuple[int, Raw]]:
        """Yields (number, row), the number being a line's or, in other files, a row's, from 1."""

    def num_bytes(self) -> int:
        """Returns the file's size."""
        return self.path.stat().st_size

    def num_text_bytes(self) -> int | None:
        """Returns about how many bytes of text its rows are, None where that is not known beforehand."""
        return None if self.name.endswith(".gz") else self.num_bytes()

    def digest(self) -> str:
        """Returns a digest of all that the file holds."""
        with self.path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()

    @contextmanager
    def opened(self) -> Iterator[IO[bytes]]:
        """Opens the file, what is packed unpacked. Raises InputError if it cannot be read."""
        try:
            with gzip.open(self.path) if self.name.endswith(".gz") else self.path.open("rb") as file:
                yield file
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise InputError(f"{self.name}: not a whole gzip file ({error}). Pack it anew.") from None
        except OSError as error:
            raise InputError(f"{self.name}: cannot be read ({error.strerror or error}).") from None


class JsonLines(DataFile):
    """A file with an object a line."""

    def rows(self) -> Iterator[tuple[int, bytes]]:
        with self.opened() as file:
            for number, raw in enumerate(file, start=1):  # bytes break at \n only; text at U+2028 too
                if number == 1:
                    raw = raw.removeprefix(_BOM)
                raw = raw.strip()  # bytes: of ASCII white space only
                if raw:
                    yield number, raw


class JsonList(DataFile):
    """A file with one list of objects, read piece by piece."""

    unit = " row "

    def rows(self) -> Iterator[tuple[int, bytes]]:
        with self.opened() as file:
            text = _Text(file, self.name)
            text.skip("[")
            number = 0
            while text.next() != "]":
                number += 1
                yield number, text.value(f"{self.name} row {number}").encode("utf-8", "surrogatepass")
                if text.next() != "]":
                    text.skip(",")
            text.skip("]")
            if text.next():
                raise InputError(f"{self.name}: more follows the end of the list. Write one object a line.")


class _Text:
    """A file's text of which only a piece is held. Raises InputError where it is not as it should be."""

    def __init__(self, file: IO[bytes], name: str):
        self._file, self._name = file, name
        self._decoder = codecs.getincrementaldecoder("utf-8-sig")()
        self._json = json.JSONDecoder()
        self._held, self._at = "", 0

    def next(self) -> str:
        """Returns the next character that is not white space, "" at the end; it stays where it is."""
        while True:
            self._at = _WHITE.match(self._held, self._at).end()
            if self._at < len(self._held) or not self._read():
                return self._held[self._at : self._at + 1]

    def skip(self, character: str) -> None:
        """Goes past a character that has to come next."""
        found = self.next()
        if found != character:
            what = repr(found) if found else "the end of the file"
            raise InputError(f"{self._name}: not a JSON list: {what} where {character!r} has to be.")
        self._at += 1

    def value(self, where: str) -> str:
        """Returns the text of the JSON value that comes next."""
        while True:
            try:
                end = self._json.raw_decode(self._held, self._at)[1]
            except (ValueError, RecursionError) as error:
                if isinstance(error, RecursionError) or not self._read():
                    reason = getattr(error, "msg", error)
                    raise InputError(f"{where}: not JSON ({reason}).") from None
                continue
            if end < len(self._held) or not self._read():  # a number might go on
                text, self._at = self._held[self._at : end], end
                return text

    def _read(self) -> bool:
        """Reads at least as much again as is held; tells whether there was more."""
        raw = self._file.read(max(_READ_BYTES, len(self._held) - self._at))
        try:
            more = self._decoder.decode(raw, final=not raw)
        except UnicodeDecodeError as error:
            raise InputError(f"{self._name}: not UTF-8 ({error.reason}). Save the file as UTF-8.") from None
        self._held, self._at = self._held[self._at :] + more, 0
        return bool(raw)


class Csv(DataFile):
    """A file of values with commas between them, the first line being the columns' names; all is text."""

    def rows(self) -> Iterator[tuple[int, Cells | InputError]]:
        csv.field_size_limit(sys.maxsize)
        with self.opened() as file:
            reader = csv.reader(self._lines(file), strict=True)
            names, begin = None, 1
            while (cells := self._next(reader, begin)) is not None:
                if names is None:
                    names = self._checked_names(cells) if cells else None
                elif cells:
                    yield begin, self._row(names, cells, begin)
                begin = reader.line_num + 1

    def _row(self, names: list[str], cells: list[str], begin: int) -> Cells | InputError:
        if len(cells) == len(names):
            return Cells(zip(names, cells, strict=True))
        return InputError(
            f"{self.name}:{begin}: {len(cells)} values for {len(names)} columns ({', '.join(names)}). "
            "Put values with commas or line ends into quotes."
        )

    def _next(self, reader: Any, begin: int) -> list[str] | None:
        try:
            return next(reader, None)
        except csv.Error as error:
            raise InputError(f"{self.name}:{begin}: not CSV ({error}).") from None

    def _lines(self, file: IO[bytes]) -> Iterator[str]:
        for number, raw in enumerate(file, start=1):
            if number == 1:
                raw = raw.removeprefix(_BOM)
            yield decoded(raw, f"{self.name}:{number}")

    def _checked_names(self, names: list[str]) -> list[str]:
        if "" in names or len(set(names)) < len(names):
            raise InputError(
                f"{self.name}:1: the first line names the columns, each by a name of its own; it is "
                f"{', '.join(map(repr, names))}."
            )
        return names


class Parquet(DataFile):
    """A file of typed columns; a value that is null counts as left out."""

    unit = " row "

    def num_text_bytes(self) -> None:
        return None  # its columns are packed

    def rows(self) -> Iterator[tuple[int, dict[str, Any]]]:
        import pyarrow
        from pyarrow import parquet

        number = 0
        with self.opened() as file:
            try:
                batches = iter(parquet.ParquetFile(file).iter_batches(_PARQUET_ROWS))
            except (pyarrow.ArrowException, OSError) as error:
                raise InputError(f"{self.name}: not a Parquet file that can be read ({error}).") from None
            while (batch := self._next(batches, number)) is not None:
                for values in batch:
                    number += 1
                    yield number, without_nulls(values)

    def _next(self, batches: Iterator[Any], number: int) -> list[dict[str, Any]] | None:
        """Returns the rows after row `number`, None at the end.

        Raises: InputError for what Arrow cannot read, or Python has no value for: text that is not UTF-8, a
        year of five digits, a time zone that nobody knows.
        """
        try:
            return next(batches).to_pylist()
        except StopIteration:
            return None
        except Exception as error:  # each with an exception of its own
            where = f"after row {number}" if number else "from its first row on"
            raise InputError(f"{self.name}: cannot be read {where} ({error}).") from None


def without_nulls(value: Any) -> Any:
    """Returns a typed column's value without the keys that are null: their rows or turns do not have them."""
    if isinstance(value, dict):
        return {key: without_nulls(each) for key, each in value.items() if each is not None}
    return [without_nulls(each) for each in value] if isinstance(value, list) else value


def on_hub(path: str) -> bool:
    """Tells whether a name leads nowhere here and is written as a data set on the hub is, owner/name."""
    is_id = _HUB_ID.fullmatch(path) is not None and suffix_of(Path(path)) not in SUFFIXES
    return is_id and not path_of(path).exists()


def path_of(name: str) -> Path:
    """Returns where a file is that is written as a path or as bundled:NAME."""
    return bundled_data(name.removeprefix(BUNDLED)) if name.startswith(BUNDLED) else Path(name).expanduser()


def data_file(name: str) -> DataFile:
    """Returns a file of rows, whose kind its name tells, or its first character where it is JSON.

    Raises: InputError if there is none or it cannot be read.
    """
    path = path_of(name)
    if path.is_dir():
        raise InputError(f"{name}: is a folder. Name the file or the files in it.")
    try:
        is_file = stat.S_ISREG(path.stat().st_mode)
        if is_file:
            path.open("rb").close()
    except OSError as error:
        hint = "Check the path in data.train or data.valid; it is taken from the folder you run in."
        if name.startswith(BUNDLED):
            bundled = sorted(p.name for p in path.parent.glob("*.jsonl"))
            hint = f"Bundled are: {', '.join(bundled) or 'none'}."
        raise InputError(f"{name}: cannot be read ({error.strerror}). {hint}") from None
    if not is_file:  # rows are read more than once
        raise InputError(f"{name}: is a pipe or a device. Save the rows in a file, and name that.")
    kind = suffix_of(path)
    if kind == ".parquet":
        return Parquet(name)
    if kind == ".csv":
        return Csv(name)
    with JsonLines(name).opened() as file:
        begin = file.read(_READ_BYTES).removeprefix(_BOM).lstrip()[:1]
    return JsonList(name) if begin == b"[" else JsonLines(name)


def suffix_of(path: Path) -> str:
    """Returns a file's ending in small letters, without .gz."""
    return Path(path.name.lower().removesuffix(".gz")).suffix
