"""What a run trains, and on what: the rows first, since a wrong one is told before a model is read."""

import logging
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Optional

import numpy as np

from mlxft.backend import shape_multiple
from mlxft.config.schema import Config
from mlxft.data.batches import BatchOrder, PackedOrder, SampleOrder, order_of, packed_sizes
from mlxft.data.fingerprint import rows_digest
from mlxft.data.load import is_large, load_first, load_for, mixture_in, stream_for
from mlxft.data.mixture import Mixture
from mlxft.data.rows import TokenRows, sizes_of
from mlxft.data.sources import sets_of
from mlxft.errors import InputError
from mlxft.models.adapters import settle
from mlxft.models.decoder import DecoderView, view
from mlxft.models.load import load_model
from mlxft.models.lora import AdapterReport, apply_adapter
from mlxft.models.manifest import check_base
from mlxft.models.new_tokens import NewToken, Vocabulary
from mlxft.training import optimizer
from mlxft.training.layout_choice import log_tokens
from mlxft.training.objectives.common import Row
from mlxft.training.objectives.unpaired import mismatch
from mlxft.training.resume import Continuation
from mlxft.training.stream_windows import StreamWindows
from mlxft.training.windows import Windows

log = logging.getLogger("mlxft")

_SAMPLED_ROWS = 1000  # of a large set, to plan with


@dataclass(frozen=True)
class Rows:
    """The rows to train on and those to validate with, which may be none.

    mixture: how often those to train on are seen, where sets have weights. stream: where those to train on
    are read as they are needed; `train` then has the first of them.
    """

    train: Sequence[Row]
    valid: Sequence[Row]
    mixture: Optional[Mixture] = None
    stream: Optional[StreamWindows] = None

    def digests(self) -> dict[str, Optional[str]]:
        """Returns {"train": ..., "valid": ...}: the same as long as tokens, masks and order are."""
        train = _digest(self.train)
        if self.stream:
            train += " " + ",".join(map(str, self.stream.source_sizes))
        if self.mixture:
            train += " " + ",".join(map(str, self.mixture.counts))
        return {"train": train, "valid": _digest(self.valid) if self.valid else None}


def _digest(rows: Sequence[Row]) -> str:
    return rows.digest if isinstance(rows, TokenRows) else rows_digest(rows)


def needs_tokenizer(config: Config) -> bool:
    """Tells whether a run cannot do without the model's tokenizer: its rows are text, or its samples are."""
    return config.data.format != "tokens" or bool(config.trainer.samples)


def load_rows(config: Config, vocabulary: Vocabulary) -> Rows:
    """Returns the rows of `data.train` and `data.valid` for the objective.

    Raises: InputError with file and line.
    """
    data, objective = config.data, config.trainer.objective

    def loaded(source: Any, name: str, validates: bool) -> TokenRows:
        sets = sets_of(source, data, validates)
        rows, report = load_for(objective, sets, data, vocabulary.tokenizer, vocabulary.size)
        for line in report.lines():
            log.info("%s: %s", name, line)
        return rows

    if data.streaming:
        stream = _stream(config, vocabulary)
        valid = loaded(data.valid, "validation rows", True) if data.valid is not None else []
        return Rows(stream.sample, valid, stream=stream)
    train = loaded(data.train, "training rows", False)
    mixture = mixture_in(train, data, config.trainer.seed)
    for line in mixture.lines() if mixture else ():
        log.info("training rows: %s", line)
    valid: Sequence[Row] = loaded(data.valid, "validation rows", True) if data.valid is not None else []
    if objective == "kto":
        return Rows(mismatch(train, data.max_length), mismatch(valid, data.max_length), mixture)
    return Rows(train, valid, mixture)


def _stream(config: Config, vocabulary: Vocabulary) -> StreamWindows:
    data = config.data
    stream = stream_for(config.trainer.objective, data, vocabulary.tokenizer, vocabulary.size)
    windows = StreamWindows(stream, data, config.trainer.accumulate, config.trainer.seed)
    lengths = [row.length for row in windows.sample]
    log.info(
        "training rows: read as they are needed; the first %s: median %s, longest %s tokens",
        *(f"{number:,.0f}" for number in (len(lengths), statistics.median(lengths), max(lengths))),
    )
    return windows


def warn_of_positions(sets: Sequence[Sequence[Row]], most: Optional[int]) -> None:
    """Warns of rows that are longer than the positions the model was made for. most: None if unknown."""
    if most is None:
        return
    lengths = np.concatenate([sizes_of(rows, "num_tokens") for rows in sets])
    longer = int((lengths > most).sum())
    if longer:
        log.warning(
            "%d of %d rows are longer than the %d positions the model was made for (the longest has %d "
            "tokens): it has never seen the places beyond. data.max_length=%d cuts them",
            longer, len(lengths), most, lengths.max(), most,
        )  # fmt: skip


def warn_of_unseen(new: Sequence[NewToken], rows: Rows) -> None:
    """Warns of new tokens that no row to train on has: their rows would stay what they began as."""
    if not new or rows.stream is not None:
        return
    if isinstance(rows.train, TokenRows):
        arrays = (array for block in rows.train.blocks for array in block.values.values())
    else:
        arrays = (getattr(row, field.name) for row in rows.train for field in fields(row))
    seen: set[int] = set()
    for array in arrays:
        if isinstance(array, np.ndarray) and array.dtype == np.int32:  # tokens, no mask
            seen.update(np.unique(array[array >= new[0].number]).tolist())
    missing = [token.text for token in new if token.number not in seen]
    if missing:
        log.warning("no row to train on has %s: nothing is learnt of them", ", ".join(missing))


def check_steps(config: Config, total_steps: int, continuation: Optional[Continuation] = None) -> None:
    """Raises InputError if a run of so many steps is over before it begins, or before its rate has risen."""
    if continuation is not None and continuation.checkpoint.step > total_steps:
        raise InputError(
            f"{continuation.checkpoint.folder} has {continuation.checkpoint.step} steps done, and the run is "
            f"to have {total_steps}. Give more: trainer.max_steps or trainer.epochs"
        )
    optimizer.check_schedule(config.schedule, total_steps)


def in_windows(config: Config, loaded: Rows) -> Windows | StreamWindows:
    """Returns the rows to train on in micro-batches and windows; logs what a layout that was asked for gives.

    Raises: InputError as `order_of`.
    """
    if loaded.stream is not None:
        return loaded.stream
    rows = loaded.train
    order = order_of(rows, config.data, config.trainer.seed, loaded.mixture)
    if config.trainer.layout == "packed":
        log.info("layout: packed; %s", packed_sizes(rows, order, shape_multiple()))
    elif config.trainer.layout == "prefix_shared":
        log_tokens("prefix_shared", rows)
    return Windows(rows, order, config.trainer.accumulate)


def windows_to_plan(
    config: Config, vocabulary: Vocabulary, continuation: Optional[Continuation] = None
) -> Windows:
    """Returns the rows to train on as `in_windows` does; of a large set only the first, and one more.

    That one is as long as `data.max_length` allows, since the longest row of the set is not known.

    Raises: InputError with file and line, and where the run would have too few steps or, continuing
    another, other rows.
    """
    data, trainer, objective = config.data, config.trainer, config.trainer.objective
    sets = sets_of(data.train, data)
    if not (data.streaming or is_large(sets)):
        loaded = load_rows(config, vocabulary)
        if continuation is not None:
            continuation.check_rows(loaded.digests())
        windows = in_windows(config, loaded)
        check_steps(config, windows.total_steps(trainer.max_steps, trainer.epochs), continuation)
        return windows
    if trainer.max_steps is not None:
        check_steps(config, trainer.max_steps, continuation)
    of_model = vocabulary.tokenizer, vocabulary.size
    first, report = load_first(objective, sets, data, *of_model, _SAMPLED_ROWS)
    for line in report.lines():
        log.info("training rows: %s", line)
    log.info("training rows: the longest is taken to have data.max_length=%d tokens", data.max_length)
    rows: list[Row] = mismatch(first, data.max_length) if objective == "kto" else list(first)
    room = data.max_length if data.batch_tokens is None else min(data.max_length, data.batch_tokens + 1)
    rows.append(max(rows, key=lambda row: row.length).stretched(room))
    if data.batch_tokens is not None:
        order: BatchOrder | PackedOrder = order_of(rows, data, trainer.seed)
    else:
        order = SampleOrder(sizes_of(first, "num_tokens"), data.batch_size, data.shuffle, trainer.seed)
    return Windows(rows, order, trainer.accumulate)


def load_trained(
    config: Config, folder: Path, new: Sequence[NewToken] = ()
) -> tuple[DecoderView, AdapterReport]:
    """Returns the model in `folder` with what is trained on it, and what that is.

    new: tokens that it is given. Raises: InputError.
    """
    if not config.adapter.any_base:
        check_base(config.adapter.starts, folder)
    model = load_model(folder, config.model.dtype, new)
    made = view(model)
    report = apply_adapter(model, config.adapter, config.trainer.seed)
    settle(model)
    log.info("%s", report)
    return made, report
