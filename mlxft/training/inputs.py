"""What a run trains, and on what: the rows first, since a wrong one is told before a model is read."""

import hashlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Optional

import numpy as np

from mlxft.config.schema import Config, DataConfig
from mlxft.data.example import Example
from mlxft.data.load import load_examples
from mlxft.models.decoder import DecoderView, view
from mlxft.models.load import load_model
from mlxft.models.lora import AdapterReport, apply_adapter

log = logging.getLogger("mlxft")


@dataclass(frozen=True)
class Rows:
    """The rows to train on and those to validate with, which may be none."""

    train: list[Example]
    valid: list[Example]

    def fingerprints(self) -> dict[str, Optional[str]]:
        """Returns {"train": ..., "valid": ...}: the same as long as tokens, masks and order are."""
        return {"train": _fingerprint(self.train), "valid": _fingerprint(self.valid) if self.valid else None}


def load_rows(data: DataConfig, tokenizer: Any, vocabulary: int) -> Rows:
    """Returns the rows of `data.train` and `data.valid`. Raises: InputError with file and line."""
    train, report = load_examples(data.train, data, tokenizer, vocabulary)
    _log_lines("training rows", report.lines())
    valid: list[Example] = []
    if data.valid is not None:
        valid, report = load_examples(data.valid, data, tokenizer, vocabulary)
        _log_lines("validation rows", report.lines())
    return Rows(train, valid)


def load_trained(config: Config, folder: Path) -> tuple[DecoderView, AdapterReport]:
    """Returns the model in `folder` with what is trained on it, and what that is. Raises: InputError."""
    model, _ = load_model(folder, config.model.dtype)
    made = view(model)
    report = apply_adapter(model, config.adapter, config.trainer.seed)
    log.info("%s", report)
    return made, report


def _fingerprint(rows: Sequence[Example]) -> str:
    digest = hashlib.sha256()
    for row in rows:
        for name, value in vars(row).items():
            if isinstance(value, np.ndarray | bool):
                array = np.asarray(value)
                digest.update(f"{name} {array.dtype} {array.shape} ".encode())
                digest.update(array.tobytes())
    return digest.hexdigest()


def _log_lines(what: str, lines: Sequence[str]) -> None:
    for line in lines:
        log.info("%s: %s", what, line)
