"""From what `data.train` names to rows for training: read, checked, encoded and fitted, with a report."""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from mlxft.config.choices import TRAIN_ON
from mlxft.config.schema import DataConfig
from mlxft.data import cache
from mlxft.data.chunks import ChunkEncoder, Tally, Task, chunks_of
from mlxft.data.example import Example, Pair, Unpaired
from mlxft.data.formats import OBJECTIVES, Form, check_columns, check_kind, find_form
from mlxft.data.mixture import Mixture, mixture_of
from mlxft.data.progress import Bar
from mlxft.data.report import DataReport
from mlxft.data.rows import Block, TokenRows
from mlxft.data.sources import Part, Row, RowSet, check_columns_exist, no_rows, row_of, sets_of
from mlxft.data.stream import RowStream
from mlxft.data.truncate import Limit
from mlxft.data.workers import Workers, num_cores
from mlxft.errors import InputError

log = logging.getLogger("mlxft")

_KEPT_BYTES = 4 << 20  # tokenised within a second or two: not worth a file
_WORTH_WORKERS_BYTES = 16 << 20  # a process takes a second or two to start


def load_for(
    objective: str, sets: list[RowSet], cfg: DataConfig, tokenizer: Any, vocab_size: int
) -> tuple[TokenRows, DataReport]:
    """Returns the rows of some sets as `trainer.objective` trains on them, and what became of the rows.

    sets: as `sets_of` finds them. Other arguments and errors as `load_examples`.
    """
    return _load(kind_for(objective), sets, cfg, tokenizer, vocab_size)


def load_examples(
    source: Any, cfg: DataConfig, tokenizer: Any, vocab_size: int
) -> tuple[Sequence[Example], DataReport]:
    """Returns the examples of a data set in the order of its rows, and what became of the rows.

    source: as `data.train`. tokenizer: mlx-lm's or transformers'; may be None for rows of tokens. vocab_size:
    ids from 0 to vocab_size - 1 are valid.

    Raises:
        InputError: a row or a key is wrong (with file and line, or the key), the rows are for another
            objective, or no row can be trained on.
    """
    return _load("examples", sets_of(source, cfg), cfg, tokenizer, vocab_size)


def load_pairs(
    source: Any, cfg: DataConfig, tokenizer: Any, vocab_size: int
) -> tuple[Sequence[Pair], DataReport]:
    """Returns the pairs of a preference data set in the order of its rows, and what became of the rows.

    Arguments and errors as `load_examples`. Trained are the answers: with `cfg.train_on` "last_assistant"
    only their last turns.
    """
    return _load("pairs", sets_of(source, cfg), cfg, tokenizer, vocab_size)


def load_unpaired(
    source: Any, cfg: DataConfig, tokenizer: Any, vocab_size: int
) -> tuple[Sequence[Unpaired], DataReport]:
    """Returns the labelled answers of a data set in the order of its rows, and what became of the rows.

    Arguments and errors as `load_pairs`.
    """
    return _load("unpaired", sets_of(source, cfg), cfg, tokenizer, vocab_size)


def _load(
    kind: str, sets: list[RowSet], cfg: DataConfig, tokenizer: Any, vocab_size: int
) -> tuple[TokenRows, DataReport]:
    _check_settings(kind, cfg)
    blocks: list[Block] = []
    tasks, tallies, sizes = [], [], []
    for rows in sets:
        parts = rows.parts()
        task = make_task(kind, rows, parts, cfg, tokenizer, vocab_size)
        made, tally = _made(task, parts, cfg, tokenizer, rows.name)
        blocks += made
        sizes.append(sum(map(len, made)))
        tasks.append(task)
        tallies.append(tally)
    report = _report(kind, sets, cfg)
    for task, tally in zip(tasks, tallies, strict=True):
        report.add(task, tally)
    rows = TokenRows(blocks, sizes)
    report.close(rows, cfg)
    return rows, report


def load_first(
    objective: str, sets: list[RowSet], cfg: DataConfig, tokenizer: Any, vocab_size: int, number: int
) -> tuple[TokenRows, DataReport]:
    """Returns the first `number` rows that are left of each set, and what became of those read for it.

    Other arguments and errors as `load_for`.
    """
    kind = kind_for(objective)
    _check_settings(kind, cfg)
    report = _report(kind, sets, cfg)
    blocks: list[Block] = []
    for rows in sets:
        parts = rows.parts(streaming=True)
        task = make_task(kind, rows, parts, cfg, tokenizer, vocab_size)
        encode, left = ChunkEncoder(task, tokenizer), number
        for chunk in chunks_of(parts, number):
            block, tally = encode(chunk)
            report.add(task, tally)
            blocks.append(replace(block, names=task.names))
            left -= len(block)
            if left <= 0:
                break
    report.source = f"the first rows of {report.source}"
    made = TokenRows(blocks)
    report.close(made, cfg)
    return made, report


def is_large(sets: list[RowSet]) -> bool:
    """Tells whether going through all rows takes more than a moment, or has to be taken to."""
    if any(rows.is_on_hub for rows in sets):
        return True
    return sum(part.num_bytes() for rows in sets for part in rows.parts()) >= _KEPT_BYTES


def _report(kind: str, sets: list[RowSet], cfg: DataConfig) -> DataReport:
    name = sets[0].name if len(sets) == 1 else f"{sets[0].name} and {len(sets) - 1} more"
    return DataReport(name, "", cfg.max_length, kind)


def stream_for(objective: str, cfg: DataConfig, tokenizer: Any, vocab_size: int) -> RowStream:
    """Returns the rows of `cfg.train` as a stream; arguments and errors as `load_for`."""
    kind = kind_for(objective)
    _check_settings(kind, cfg)
    sets = sets_of(cfg.train, cfg)
    if len(sets) > 1:
        raise InputError("data.train: a stream is one set of rows. Name files without keys of their own.")
    parts = sets[0].parts(streaming=True)
    return RowStream(make_task(kind, sets[0], parts, cfg, tokenizer, vocab_size), parts, tokenizer)


def kind_for(objective: str) -> str:
    """Returns what rows become for an objective: examples, pairs or unpaired."""
    return next(kind for kind, objectives in OBJECTIVES.items() if objective in objectives)


def mixture_in(rows: TokenRows, cfg: DataConfig, seed: int) -> Mixture | None:
    """Returns how the sets of `cfg.train` are mixed, whose rows these are; None where none has a weight."""
    sets = sets_of(cfg.train, cfg)
    return mixture_of([each.name for each in sets], rows.set_sizes, [each.weight for each in sets], seed)


def _check_settings(kind: str, cfg: DataConfig) -> None:
    if cfg.train_on not in TRAIN_ON:
        raise InputError(f"data.train_on={cfg.train_on}: must be one of {', '.join(TRAIN_ON)}.")
    if cfg.train_on == "all" and kind != "examples":
        raise InputError(
            "data.train_on=all: objectives that compare answers train on answers only. Leave it out, or say "
            "assistant or last_assistant."
        )


def make_task(
    kind: str, rows: RowSet, parts: list[Part], cfg: DataConfig, tokenizer: Any, vocab_size: int
) -> Task:
    """Returns how a set's rows are made, their form told by the first of them.

    Raises: InputError for a column that no row has, or rows of no known form or for another objective.
    """
    columns = dict(rows.columns)
    check_columns(columns)
    check_columns_exist(rows, parts)
    skips = cfg.on_bad_row == "skip"
    first, form = _first(parts, columns, cfg.format, kind, skips)
    check_kind(first, form, kind)
    return Task(
        kind,
        form,
        cfg.format,
        first.where,
        tuple(f"{part.name}{part.unit}" for part in parts),
        columns,
        Limit(cfg.max_length, cfg.truncate, getattr(tokenizer, "bos_token_id", None)),
        vocab_size,
        cfg.train_on,
        skips,
    )


def _first(
    parts: list[Part], columns: dict[str, str], wanted: str, kind: str, skips: bool
) -> tuple[Row, Form]:
    """Returns the first row and its form; where faulty rows are skipped, of those that have a form."""
    fault = None
    for part in parts:
        for number, raw in part.rows():
            try:
                row = row_of(raw, f"{part.name}{part.unit}{number}", columns)
                return row, find_form(row, wanted, kind)
            except InputError as error:
                fault = fault or error
                if not skips:
                    raise
    raise fault or InputError(no_rows(parts[0].name))


def _made(
    task: Task, parts: list[Part], cfg: DataConfig, tokenizer: Any, name: str
) -> tuple[list[Block], Tally]:
    """Returns a set's rows and what became of them; of a large set from the disk, where they are kept."""
    num_bytes = sum(part.num_bytes() for part in parts)

    def made() -> Iterator[tuple[Block, Tally]]:
        number = num_workers(cfg, num_bytes)
        texts = [part.num_text_bytes() for part in parts]
        bar = Bar(name, None if None in texts else sum(texts))
        chunks = bar.counted(chunks_of(parts))
        if not number:
            yield from bar.followed(map(ChunkEncoder(task, tokenizer), chunks))
            return
        with Workers(number, task, tokenizer) as workers:
            yield from bar.followed(workers.made(chunks))

    wanted = num_bytes >= _KEPT_BYTES if cfg.cache == "auto" else cfg.cache
    key = cache.key_of(task, [part.digest() for part in parts], tokenizer) if wanted else None
    if key is not None:
        found = cache.kept(key, task.names)
        if found is not None:
            log.info("%s: tokenised rows as kept in %s", name, cache.folder())
            return found
        try:
            cache.keep(key, task.kind, made())
            found = cache.kept(key, task.names)
        except OSError as error:
            log.warning("tokenised rows are not kept for later: %s", error)
        if found is not None:
            return found
    blocks, tally = [], Tally()
    for block, more in made():
        blocks.append(replace(block, names=task.names))
        tally.add(more)
    return blocks, tally


def num_workers(cfg: DataConfig, num_bytes: int) -> int:
    """Returns how many processes tokenise so many bytes; 0: this one alone, with the tokenizer's threads."""
    if cfg.num_workers != "auto":
        return cfg.num_workers
    return num_cores() if num_bytes >= _WORTH_WORKERS_BYTES else 0
