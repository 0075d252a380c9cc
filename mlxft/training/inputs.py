"""What a run trains, and on what: the rows first, since a wrong one is told before a model is read."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Optional

from mlxft.backend import shape_multiple
from mlxft.config.schema import Config
from mlxft.data.batches import order_of, packed_sizes
from mlxft.data.fingerprint import rows_digest
from mlxft.data.load import load_for
from mlxft.models.adapters import settle
from mlxft.models.decoder import DecoderView, view
from mlxft.models.load import load_model
from mlxft.models.lora import AdapterReport, apply_adapter
from mlxft.training.layout_choice import log_tokens
from mlxft.training.objectives.common import Row
from mlxft.training.objectives.unpaired import mismatch
from mlxft.training.windows import Windows

log = logging.getLogger("mlxft")


@dataclass(frozen=True)
class Rows:
    """The rows to train on and those to validate with, which may be none."""

    train: list[Row]
    valid: list[Row]

    def digests(self) -> dict[str, Optional[str]]:
        """Returns {"train": ..., "valid": ...}: the same as long as tokens, masks and order are."""
        return {"train": rows_digest(self.train), "valid": rows_digest(self.valid) if self.valid else None}


def load_rows(config: Config, tokenizer: Any, vocabulary: int) -> Rows:
    """Returns the rows of `data.train` and `data.valid` for the objective.

    Raises: InputError with file and line.
    """
    data, objective = config.data, config.trainer.objective

    def loaded(source: Any, name: str) -> list[Row]:
        rows, report = load_for(objective, source, data, tokenizer, vocabulary)
        for line in report.lines():
            log.info("%s: %s", name, line)
        return mismatch(rows, data.max_length) if objective == "kto" else rows

    train = loaded(data.train, "training rows")
    return Rows(train, loaded(data.valid, "validation rows") if data.valid is not None else [])


def warn_of_positions(rows: Sequence[Row], most: Optional[int]) -> None:
    """Warns of rows that are longer than the positions the model was made for. most: None if unknown."""
    longer = [row.num_tokens for row in rows if most is not None and row.num_tokens > most]
    if longer:
        log.warning(
            "%d of %d rows are longer than the %d positions the model was made for (the longest has %d "
            "tokens): it has never seen the places beyond. data.max_length=%d cuts them",
            len(longer), len(rows), most, max(longer), most,
        )  # fmt: skip


def in_windows(config: Config, rows: Sequence[Row]) -> Windows:
    """Returns the rows to train on in micro-batches and windows; logs what a layout that was asked for gives.

    Raises: InputError as `order_of`.
    """
    order = order_of(rows, config.data, config.trainer.seed)
    if config.trainer.layout == "packed":
        log.info("layout: packed; %s", packed_sizes(rows, order, shape_multiple()))
    elif config.trainer.layout == "prefix_shared":
        log_tokens("prefix_shared", rows)
    return Windows(rows, order, config.trainer.accumulate)


def load_trained(config: Config, folder: Path) -> tuple[DecoderView, AdapterReport]:
    """Returns the model in `folder` with what is trained on it, and what that is. Raises: InputError."""
    model = load_model(folder, config.model.dtype)
    made = view(model)
    report = apply_adapter(model, config.adapter, config.trainer.seed)
    settle(model)
    log.info("%s", report)
    return made, report
