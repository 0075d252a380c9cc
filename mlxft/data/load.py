"""From a data file to rows for training: reads, checks, encodes and fits every row, and reports on them."""

from collections.abc import Iterator
from typing import Any

from mlxft.config.choices import TRAIN_ON
from mlxft.config.schema import DataConfig
from mlxft.data.encode import RowEncoder
from mlxft.data.example import Example, Pair, Unpaired
from mlxft.data.formats import (
    OBJECTIVES,
    Form,
    check_columns,
    check_kind,
    check_same,
    find_form,
    type_row,
)
from mlxft.data.pairs import fit_pair, split_pair, split_unpaired
from mlxft.data.preferences import type_pair, type_unpaired
from mlxft.data.report import DataReport, source_name
from mlxft.data.sources import Row, read_rows
from mlxft.data.truncate import Limit, fit
from mlxft.errors import InputError


def load_for(
    objective: str, source: Any, cfg: DataConfig, tokenizer: Any, vocab_size: int
) -> tuple[list[Example] | list[Pair] | list[Unpaired], DataReport]:
    """Returns the rows of a data set as `trainer.objective` trains on them, and what became of the rows.

    Arguments and errors as `load_examples`.
    """
    load = {"examples": load_examples, "pairs": load_pairs, "unpaired": load_unpaired}
    kind = next(kind for kind, objectives in OBJECTIVES.items() if objective in objectives)
    return load[kind](source, cfg, tokenizer, vocab_size)


def load_examples(
    source: Any, cfg: DataConfig, tokenizer: Any, vocab_size: int
) -> tuple[list[Example], DataReport]:
    """Returns the examples of a data set in the order of its rows, and what became of the rows.

    source: a file of JSON lines, several, or "bundled:NAME". tokenizer: mlx-lm's or transformers'; may be
    None for rows of tokens. vocab_size: ids from 0 to vocab_size - 1 are valid.

    Raises:
        InputError: a row or a key is wrong (with file and line, or the key), the rows are for another
            objective, or no row can be trained on.
    """
    rows, form, report = _open(source, cfg, "examples")
    limit, encoder = _limit(cfg, tokenizer), RowEncoder(tokenizer, vocab_size, cfg.train_on)
    examples = []
    for row in rows:
        tokens, mask = encoder.encode(type_row(row, form.format, vocab_size))
        fitted = fit(tokens, mask, limit, row.where)
        if report.keeps(fitted, row.where):
            examples.append(Example(fitted.tokens, fitted.mask, row.where))
    return examples, _closed(report, examples, encoder, cfg)


def load_pairs(
    source: Any, cfg: DataConfig, tokenizer: Any, vocab_size: int
) -> tuple[list[Pair], DataReport]:
    """Returns the pairs of a preference data set in the order of its rows, and what became of the rows.

    Arguments and errors as `load_examples`. Trained are the answers: with `cfg.train_on` "last_assistant"
    only their last turns.
    """
    rows, form, report = _open(source, cfg, "pairs")
    limit, encoder = _limit(cfg, tokenizer), RowEncoder(tokenizer, vocab_size, cfg.train_on)
    pairs = []
    for row in rows:
        typed = type_pair(row, form, vocab_size)
        pair = split_pair(encoder.encode(typed.chosen), encoder.encode(typed.rejected), row.where)
        fitted = fit_pair(pair, limit)
        if report.keeps(fitted, row.where):
            pairs.append(fitted.pair)
    return pairs, _closed(report, pairs, encoder, cfg)


def load_unpaired(
    source: Any, cfg: DataConfig, tokenizer: Any, vocab_size: int
) -> tuple[list[Unpaired], DataReport]:
    """Returns the labelled answers of a data set in the order of its rows, and what became of the rows.

    Arguments and errors as `load_pairs`.
    """
    rows, form, report = _open(source, cfg, "unpaired")
    limit, encoder = _limit(cfg, tokenizer), RowEncoder(tokenizer, vocab_size, cfg.train_on)
    answers = []
    for row in rows:
        typed = type_unpaired(row, form, vocab_size)
        tokens, mask = encoder.encode(typed.answer)
        fitted = fit(tokens, mask, limit, row.where)
        if report.keeps(fitted, row.where):
            answers.append(split_unpaired(fitted.tokens, fitted.mask, typed.label, row.where))
    return answers, _closed(report, answers, encoder, cfg)


def _open(source: Any, cfg: DataConfig, kind: str) -> tuple[Iterator[Row], Form, DataReport]:
    """Returns a set's rows, their form, and a report that has only begun; the keys of `cfg` are checked.

    Going through the rows raises InputError at one of another form.
    """
    if cfg.train_on not in TRAIN_ON:
        raise InputError(f"data.train_on={cfg.train_on}: must be one of {', '.join(TRAIN_ON)}.")
    if cfg.train_on == "all" and kind != "examples":
        raise InputError(
            "data.train_on=all: objectives that compare answers train on answers only. Leave it out, or say "
            "assistant or last_assistant."
        )
    check_columns(dict(cfg.columns or {}))
    rows = read_rows(source, cfg.columns)
    first = next(iter(rows))
    form = find_form(first, cfg.format, kind)
    check_kind(first, form, kind)

    def alike() -> Iterator[Row]:
        for row in rows:
            check_same(row, form, cfg.format, first.where)
            yield row

    return alike(), form, DataReport(source_name(source), form.format, cfg.max_length, kind, len(rows))


def _limit(cfg: DataConfig, tokenizer: Any) -> Limit:
    return Limit(cfg.max_length, cfg.truncate, getattr(tokenizer, "bos_token_id", None))


def _closed(report: DataReport, rows: list, encoder: RowEncoder, cfg: DataConfig) -> DataReport:
    report.close(rows, cfg)
    report.num_unended = encoder.num_unended
    return report
