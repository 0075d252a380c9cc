"""Tokenised rows kept on disk and mapped into memory: the same files, tokenizer and settings are read once.

An entry is two files: the rows, as Arrow record batches, and a JSON file that is written after them and says
what they must be, to the byte. Without it, or with other bytes, there is no entry.
"""

import hashlib
import json
import logging
import os
import time
from collections.abc import Iterable
from dataclasses import asdict
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from mlxft import __version__
from mlxft.data.chunks import Tally, Task
from mlxft.data.rows import FIELDS, Block, Place
from mlxft.data.template import huggingface_tokenizer, stop_token_ids

log = logging.getLogger("mlxft")

_KEPT_DAYS = 60  # since an entry was last used
_LIBRARIES = ("transformers", "tokenizers", "mlx-lm")  # whose new versions may make other tokens

Made = Iterable[tuple[Block, Tally]]


def folder() -> Path:
    """Returns where entries are."""
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "mlxft" / "data"


def key_of(task: Task, digests: list[str], tokenizer: Any) -> str | None:
    """Returns the name of what is made of files with these digests; None for what cannot be named.

    It changes with whatever may change the rows: the files, the tokenizer and its template, the settings,
    and the code here and in the libraries.
    """
    about = _about(tokenizer)
    if about is None:
        return None
    settings = asdict(task)
    del settings["first"]
    if not task.skips:  # what is said of skipped rows names the files
        del settings["names"]
    versions = [__version__, _code(), *(version(name) for name in _LIBRARIES)]
    parts = json.dumps([digests, settings, about, versions], sort_keys=True)
    return hashlib.sha256(parts.encode("utf-8", "surrogatepass")).hexdigest()[:40]


def _about(tokenizer: Any) -> list[Any] | None:
    """Returns all of a tokenizer that tokens depend on; None for one that does not tell."""
    if tokenizer is None:
        return []
    inner = huggingface_tokenizer(tokenizer)
    if not inner.is_fast:
        return None
    template = str(inner.chat_template)
    return [
        hashlib.sha256(inner.backend_tokenizer.to_str().encode()).hexdigest(),
        template,
        str(date.today()) if "strftime_now" in template else "",  # such a template writes the date
        {name: str(token) for name, token in inner.special_tokens_map.items()},
        sorted(stop_token_ids(tokenizer)),
        [type(tokenizer).__name__, type(inner).__name__, inner.split_special_tokens],
        getattr(tokenizer, "has_thinking", None),
        getattr(getattr(tokenizer, "_chat_template", None), "__module__", None),
    ]


def _code() -> str:
    """Returns a digest of the package's data code: rows of an earlier one are not taken for its own."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def kept(key: str, names: tuple[str, ...]) -> tuple[list[Block], Tally] | None:
    """Returns the rows of an entry and what became of the others; None if there is none that is whole.

    names: of the set's parts.
    """
    rows, about = _paths(key)
    try:
        said = json.loads(about.read_bytes())
        with rows.open("rb") as file:
            is_whole = hashlib.file_digest(file, "sha256").hexdigest() == said["sha256"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    if not is_whole:
        log.warning("the tokenised rows kept in %s are damaged, and made anew", rows)
        return None
    for path in (rows, about):
        os.utime(path)
    return _blocks(rows, said["kind"], names), _tally_of(said["tally"])


def keep(key: str, kind: str, made: Made) -> None:
    """Writes an entry, chunk by chunk. Raises: OSError where it cannot be written; then there is none."""
    import pyarrow as pa

    rows, about = _paths(key)
    rows.parent.mkdir(parents=True, exist_ok=True)
    _prune(rows.parent)
    aside = rows.with_name(f".{rows.name}.{os.getpid()}")
    tally = Tally()
    try:
        with aside.open("wb") as file:
            with pa.ipc.new_file(file, _schema(kind)) as writer:
                for block, more in made:
                    tally.add(more)
                    if len(block):
                        writer.write_batch(_batch(block))
            file.flush()
            os.fsync(file.fileno())
        with aside.open("rb") as file:
            said = {"sha256": hashlib.file_digest(file, "sha256").hexdigest(), "kind": kind}
        about.unlink(missing_ok=True)
        os.replace(aside, rows)
    finally:
        aside.unlink(missing_ok=True)
    aside = about.with_name(f".{about.name}.{os.getpid()}")
    aside.write_text(json.dumps(said | {"tally": _as_json(tally)}))
    os.replace(aside, about)


def _paths(key: str) -> tuple[Path, Path]:
    return folder() / f"{key}.arrow", folder() / f"{key}.json"


def _prune(place: Path) -> None:
    """Removes entries that have not been used for long, and what killed writers left."""
    oldest = time.time() - _KEPT_DAYS * 86400
    for path in place.iterdir():
        try:
            if path.stat().st_mtime < oldest:
                path.unlink()
        except FileNotFoundError:  # another run was first
            continue


def _schema(kind: str) -> Any:
    import pyarrow as pa

    lists = [
        (field, pa.list_(pa.uint8() if field.endswith("mask") else pa.int32())) for field in FIELDS[kind]
    ]
    return pa.schema(
        [
            *lists,
            ("part", pa.int32()),
            ("number", pa.int64()),
            ("supervised", pa.int32()),
            ("label", pa.uint8()),
        ]
    )


def _batch(block: Block) -> Any:
    import pyarrow as pa

    lists = [
        pa.ListArray.from_arrays(
            pa.array(block.starts[field]),
            pa.array(values.view(np.uint8) if values.dtype == bool else values),
        )
        for field, values in block.values.items()
    ]
    plain = (block.parts, block.numbers, block.supervised, block.labels.view(np.uint8))
    return pa.RecordBatch.from_arrays([*lists, *map(pa.array, plain)], schema=_schema(block.kind))


def _blocks(rows: Path, kind: str, names: tuple[str, ...]) -> list[Block]:
    import pyarrow as pa

    reader = pa.ipc.open_file(pa.memory_map(str(rows)))
    return [_block(reader.get_batch(place), kind, names) for place in range(reader.num_record_batches)]


def _block(batch: Any, kind: str, names: tuple[str, ...]) -> Block:
    def array(column: Any) -> np.ndarray:
        return column.to_numpy(zero_copy_only=True)

    values, starts = {}, {}
    for field in FIELDS[kind]:
        column = batch.column(field)
        values[field] = array(column.values).view(bool if field.endswith("mask") else np.int32)
        starts[field] = array(column.offsets)
    parts, numbers, supervised, labels = (
        array(batch.column(name)) for name in ("part", "number", "supervised", "label")
    )
    return Block(kind, values, starts, parts, numbers, supervised, labels.view(bool), names)


def _as_json(tally: Tally) -> dict[str, Any]:
    def plain(value: Any) -> Any:
        if isinstance(value, dict) and any(isinstance(key, Place) for key in value):
            return [[place.part, place.number, reason] for place, reason in value.items()]
        return value

    return {name: plain(value) for name, value in vars(tally).items()}


def _tally_of(said: dict[str, Any]) -> Tally:
    tally = Tally(**said)
    for name in ("dropped_at", "truncated_at", "skipped_at"):
        setattr(tally, name, {Place(part, number): reason for part, number, reason in said[name] or ()})
    return tally
