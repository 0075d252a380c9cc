"""The reference policy of dpo and kto: whose log-probabilities, computed when, kept where.

A reference's log-probabilities of a row are constants. By default they are computed once before
training, so that a step costs one forward of the policy, and kept on disk: the same model, adapter and
rows are never scored twice.
"""

import hashlib
import logging
import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_map

from mlxft.models.decoder import DecoderView
from mlxft.models.lora import adapter_disabled
from mlxft.training.validation import fixed_batches

log = logging.getLogger("mlxft")

# Enters the reference policy, given the view of the one in training, and gives the view to score with.
Reference = Callable[[DecoderView], AbstractContextManager[DecoderView]]
# Scores rows under a view: (rows, values a row) float32.
Score = Callable[[DecoderView, Sequence[Any]], np.ndarray]


@contextmanager
def adapter_off(view: DecoderView):
    """The base model: the policy with its adapter switched off, each layer's own scale back after."""
    with adapter_disabled(view.model):
        yield view


def as_at_start(view: DecoderView) -> Reference:
    """Returns the reference that is the policy as it is now, whatever is trained later."""
    kept = tree_map(mx.array, view.model.trainable_parameters())
    mx.eval(kept)

    @contextmanager
    def started(view: DecoderView):
        present = view.model.trainable_parameters()
        view.model.update(kept)
        try:
            yield view
        finally:
            view.model.update(present)

    return started


def another_model(other: DecoderView) -> Reference:
    """Returns the reference that is a model of its own."""

    @contextmanager
    def use(view: DecoderView):
        yield other

    return use


def score_once(view: DecoderView, rows: Sequence[Any], batch_size: int, score: Score, key: str) -> np.ndarray:
    """Returns the reference's values of every row, in the rows' order, from the disk if they were kept.

    score: scores a batch under the reference. key: stands for all that the values depend on.
    """
    path = _cache_folder() / f"{key}.npy"
    if path.exists():
        values = np.load(path)
        if len(values) == len(rows):
            log.info("reference log-probabilities: taken from %s", path)
            return values
    log.info("reference log-probabilities: scoring %d rows once", len(rows))
    place = {id(row): index for index, row in enumerate(rows)}
    found: dict[int, np.ndarray] = {}
    for batch in fixed_batches(rows, batch_size):
        found |= {place[id(row)]: values for row, values in zip(batch, score(view, batch), strict=True)}
    values = np.stack([found[index] for index in range(len(rows))]).astype(np.float32)
    _keep(path, values)
    return values


def key_of(*parts: Any) -> str:
    """Returns a name for what reference values depend on; files count by name, size and time."""
    digest = hashlib.sha256()
    for part in parts:
        if isinstance(part, Path):
            files = sorted(path for path in part.rglob("*") if path.is_file())
            part = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in files]
        digest.update(repr(part).encode() + b"\0")
    return digest.hexdigest()[:32]


def _cache_folder() -> Path:
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "mlxft" / "reference"


def _keep(path: Path, values: np.ndarray) -> None:
    """Writes the values for later runs; where that cannot be, this run has them all the same."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        aside = path.with_name(f".{path.stem}.{os.getpid()}.npy")
        np.save(aside, values)
        os.replace(aside, path)
    except OSError as error:
        log.warning("reference log-probabilities are not kept for later: %s", error)
