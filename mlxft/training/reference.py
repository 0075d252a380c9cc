"""The reference policy of dpo and kto: whose log-probabilities, computed when, kept where.

A reference's log-probabilities of a row are constants. By default they are computed once before
training, so that a step costs one forward of the policy, and kept on disk: the same model, adapter and
rows are never scored twice.
"""

import hashlib
import logging
import os
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Optional

import mlx.core as mx
import numpy as np
from mlx.utils import tree_map

from mlxft.config.schema import Config
from mlxft.data.example import Pair, Unpaired
from mlxft.data.fingerprint import fingerprint
from mlxft.errors import InputError
from mlxft.models.decoder import DecoderView
from mlxft.models.decoder import view as checked_view
from mlxft.models.load import load_model
from mlxft.models.lora_linear import adapter_disabled
from mlxft.models.resolve import resolve
from mlxft.training.validation import fixed_batches

log = logging.getLogger("mlxft")

# Bumped when the values of the same model and rows change.
_VERSION = 1

# Enters the reference policy, given the view of the one in training, and gives the view to score with.
Reference = Callable[[DecoderView], AbstractContextManager[DecoderView]]


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


def make(config: Config, view: DecoderView) -> Reference:
    """Returns the reference that `loss.reference` names, for the policy as it is before training.

    base: the policy without its adapter; all of it as it is now where every weight is trained. start: the
    policy as it is now. Anything else is the path of a model. Raises: InputError if that cannot be loaded.
    """
    named = config.loss.reference
    if is_the_start(config):
        return as_at_start(view)
    if named == "base":
        return adapter_off
    return another_model(checked_view(load_model(resolve(named, key="loss.reference"), config.model.dtype)))


def model_folder(config: Config, policy: Path) -> Path:
    """Returns the folder of the model that is the reference: the policy's, or the one that is named.

    Raises: InputError if there is none of that name.
    """
    named = config.loss.reference
    return policy if named in ("base", "start") else resolve(named, key="loss.reference")


def check_vocabulary(rows: Iterable[Pair | Unpaired], size: int) -> None:
    """Raises InputError for a row with a token that a reference with so many ids has no embedding for."""
    for row in rows:
        answers = (row.completion,) if isinstance(row, Unpaired) else (row.chosen, row.rejected)
        highest = int(max(part.max(initial=0) for part in (row.prompt, *answers)))
        if highest >= size:
            raise InputError(
                f"{row.where}: token {highest} is beyond the vocabulary of loss.reference, which ends at "
                f"{size - 1}. A reference needs the tokenizer of the model that is trained"
            )


def is_the_start(config: Config) -> bool:
    """Tells whether the reference is the policy as training begins: asked for, or nothing to switch off."""
    return config.loss.reference == "start" or (
        config.loss.reference == "base" and config.adapter.kind == "full"
    )


def with_references(objective, view: DecoderView, rows: list[Any], config: Config, folder: Path) -> list[Any]:
    """Returns the rows with their reference log-probabilities, from the disk if they were kept.

    folder: of the model that is the reference. The same model, adapter, rows and settings are scored
    once, ever.
    """
    started = is_the_start(config)
    given = config.adapter.init_from if started else None
    started_from = [Path(path) for path in ([given] if isinstance(given, str) else given or [])]
    key = _key(
        _VERSION,
        folder,
        *(started_from or [None]),
        started and (config.adapter, config.trainer.seed),
        config.model.dtype,
        config.trainer.objective,
        objective.arranger,
        config.data.batch_size,
        fingerprint(rows),
    )
    path = _cache_folder() / f"{key}.npy"
    values = _kept(path, len(rows))
    if values is not None:
        log.info("reference log-probabilities of %d rows: as kept in %s", len(rows), path)
    else:
        log.info(
            "reference log-probabilities of %d rows: computed once and kept in %s", len(rows), path.parent
        )
        values = _score(objective, view, rows, config.data.batch_size)
        _keep(path, values)
    return [replace(row, ref_logps=tuple(both)) for row, both in zip(rows, values, strict=True)]


def _score(objective, view: DecoderView, rows: list[Any], batch_size: int) -> np.ndarray:
    """Returns the reference's values (N, 2) float32 in the order of the rows."""
    place = {id(row): index for index, row in enumerate(rows)}
    values = np.zeros((len(rows), 2), np.float32)
    for batch in fixed_batches(rows, batch_size):
        values[[place[id(row)] for row in batch]] = objective.reference_logps(view, batch)
    return values


def _key(*parts: Any) -> str:
    """Returns a name for what values depend on; the files of a folder count by name, size and time."""
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


def _kept(path: Path, num_rows: int) -> Optional[np.ndarray]:
    """Returns the values that were kept, or None: not there, or damaged, and so computed again."""
    try:
        values = np.load(path)
    except (OSError, ValueError, EOFError):
        return None
    return values if values.shape == (num_rows, 2) else None


def _keep(path: Path, values: np.ndarray) -> None:
    """Writes the values for later runs; where that cannot be, this run has them all the same."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        aside = path.with_name(f".{path.stem}.{os.getpid()}.npy")
        np.save(aside, values)
        os.replace(aside, path)
    except OSError as error:
        log.warning("reference log-probabilities are not kept for later: %s", error)
