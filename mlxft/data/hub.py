"""Splits of data sets on the Hugging Face hub, or in its cache, through the `datasets` library."""

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from mlxft.data.files import without_nulls
from mlxft.errors import InputError
from mlxft.hub import first_line
from mlxft.hub import refusal as refusal_of_hub

if TYPE_CHECKING:
    from mlxft.data.sources import RowSet

log = logging.getLogger("mlxft")

_BATCH_ROWS = 512
_SPLITS = {"train": ("train",), "valid": ("validation", "valid", "val", "dev"), "test": ("test",)}


@dataclass(frozen=True)
class HubSplit:
    """One split of a data set. name: the data set with its split. data: as `datasets` loaded it."""

    name: str
    data: Any
    unit: str = " row "

    def rows(self) -> Iterator[tuple[int, dict[str, Any]]]:
        """Yields (number, row), the number counted from 1; a value that is null counts as left out."""
        number = 0
        for batch in self.data.iter(_BATCH_ROWS):
            columns = list(batch)
            for values in zip(*batch.values(), strict=True):
                number += 1
                yield number, without_nulls(dict(zip(columns, values, strict=True)))

    def num_bytes(self) -> int:
        """Returns how large the split is in memory, 0 where it is streamed."""
        return getattr(self._table, "nbytes", 0)

    def num_text_bytes(self) -> None:
        """Returns None: its columns are packed."""

    def digest(self) -> str:
        """Returns what changes when the rows do."""
        return f"{self.name} {self.data._fingerprint}"

    @cached_property
    def _table(self) -> Any:
        return getattr(self.data, "data", None)


def hub_split(path: str, rows: "RowSet", streaming: bool) -> HubSplit:
    """Returns the split of a data set that `rows` asks for.

    path: owner/name. streaming: its files are read as they are needed, and not copied first.

    Raises: InputError saying what is wrong.
    """
    import datasets

    if not sys.stderr or not sys.stderr.isatty():
        datasets.disable_progress_bars()
    refusal = refusal_of_hub("data set", path, rows.revision)
    if refusal is not None:
        streaming = False  # a copy can be gone through as well
        log.info("%s; a copy in the cache of data sets is used, if there is one", refusal)
    try:
        with _offline(refusal is not None):
            builder = datasets.load_dataset_builder(path, rows.subset, revision=rows.revision)
            _check_revision(path, rows.revision, builder.hash if refusal else None)
            if not streaming:
                builder.download_and_prepare()
            split = _split_of(path, rows, list(builder.info.splits or builder.config.data_files or ()))
            load = builder.as_streaming_dataset if streaming else builder.as_dataset
            return HubSplit(f"{path} {split}", load(split=split))
    except InputError:
        raise
    except Exception as error:  # whatever datasets, its readers and its HTTP client raise
        reason = f"{refusal}, and the cache of data sets has no copy" if refusal else first_line(error)
        raise InputError(
            f"{path}: there is no such file or folder, and no data set of that name can be had from the hub: "
            f"{reason}."
        ) from error


def _check_revision(path: str, revision: str | None, kept: str | None) -> None:
    """Raises InputError if the cache has another revision (`kept`, a commit) than the one that is wanted."""
    if kept is not None and revision is not None and not kept.startswith(revision):
        raise InputError(
            f"{path}: revision {revision!r} cannot be had from the hub, and the cache of data sets has "
            f"{kept}. Give that one, or leave the revision out."
        )


def _split_of(path: str, rows: "RowSet", names: list[str]) -> str:
    """Returns the split that is asked for, or of those that are usual the first that is there."""
    if rows.split is not None:
        if rows.split.partition("[")[0] in names:  # parts of a split are written train[:10%]
            return rows.split
        wanted = rows.split
    else:
        for split in (name for usual in rows.fallback for name in _SPLITS[usual]):
            if split in names:
                return split
        wanted = " or ".join(_SPLITS[usual][0] for usual in rows.fallback)
    raise InputError(f"{path}: it has no split {wanted}, but {', '.join(names)}. Say which with split.")


@contextmanager
def _offline(wanted: bool) -> Iterator[None]:
    """Keeps `datasets` from asking a hub that is known not to answer: it would try for half a minute."""
    import datasets.config
    from huggingface_hub import constants

    before = datasets.config.HF_HUB_OFFLINE, constants.HF_HUB_OFFLINE
    if wanted:
        datasets.config.HF_HUB_OFFLINE = constants.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        datasets.config.HF_HUB_OFFLINE, constants.HF_HUB_OFFLINE = before
