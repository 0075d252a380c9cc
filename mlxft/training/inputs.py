"""What a run trains, and on what: the rows first, since a wrong one is told before a model is read."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Optional

from mlxft.backend import shape_multiple
from mlxft.config.schema import Config
from mlxft.data.batches import order_of, packed_sizes
from mlxft.data.fingerprint import fingerprint
from mlxft.data.load import load_for, mixture_in
from mlxft.data.mixture import Mixture
from mlxft.data.rows import TokenRows
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
    """The rows to train on and those to validate with, which may be none.

    mixture: how often those to train on are seen, where sets have weights.
    """

    train: Sequence[Row]
    valid: Sequence[Row]
    mixture: Optional[Mixture] = None

    def fingerprints(self) -> dict[str, Optional[str]]:
        """Returns {"train": ..., "valid": ...}: the same as long as tokens, masks and order are."""
        train = fingerprint(self.train)
        if self.mixture:
            train += " " + ",".join(map(str, self.mixture.counts))
        return {"train": train, "valid": fingerprint(self.valid) if self.valid else None}


def load_rows(config: Config, tokenizer: Any, vocabulary: int) -> Rows:
    """Returns the rows of `data.train` and `data.valid` for the objective.

    Raises: InputError with file and line.
    """
    data, objective = config.data, config.trainer.objective

    def loaded(source: Any, name: str, validates: bool) -> TokenRows:
        rows, report = load_for(objective, source, data, tokenizer, vocabulary, validates)
        for line in report.lines():
            log.info("%s: %s", name, line)
        return rows

    train = loaded(data.train, "training rows", False)
    mixture = mixture_in(train, data, config.trainer.seed)
    for line in mixture.lines() if mixture else ():
        log.info("training rows: %s", line)
    valid: Sequence[Row] = loaded(data.valid, "validation rows", True) if data.valid is not None else []
    if objective == "kto":
        return Rows(mismatch(train, data.max_length), mismatch(valid, data.max_length), mixture)
    return Rows(train, valid, mixture)


def in_windows(config: Config, loaded: Rows) -> Windows:
    """Returns the rows to train on in micro-batches and windows; logs what a layout that was asked for gives.

    Raises: InputError as `order_of`.
    """
    rows = loaded.train
    order = order_of(rows, config.data, config.trainer.seed, loaded.mixture)
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
    log.info("%s", report)
    return made, report
