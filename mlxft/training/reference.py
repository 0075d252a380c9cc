"""The reference policy of dpo and kto: whose log-probabilities, computed when, kept where.

A reference's log-probabilities of a row are constants. By default they are computed once before
training, so that a step costs one forward of the policy, and kept on disk: the same model, adapter and
rows are not scored twice.
"""

import hashlib
import logging
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Optional

import mlx.core as mx
import numpy as np
from mlx.utils import tree_map

from mlxft.backend import backend
from mlxft.config.schema import Config
from mlxft.data.fingerprint import rows_digest
from mlxft.models.decoder import DecoderView
from mlxft.models.decoder import view as checked_view
from mlxft.models.load import load_model
from mlxft.models.lora_linear import adapter_disabled
from mlxft.models.resolve import resolve
from mlxft.progress import followed
from mlxft.training.objectives.common import Reference
from mlxft.training.reference_files import NEW_TOKENS, Digests, is_the_start
from mlxft.training.validation import fixed_batches

log = logging.getLogger("mlxft")

# Bumped when the values of the same model and rows change.
_VERSION = 2

_SECONDS_UNKEPT = 30
_SUFFIX = ".logps"  # of a file: the SHA-256 of the values, then the values, float32
_DIGEST_BYTES = 32


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


def with_references(
    objective,
    view: DecoderView,
    rows: Sequence[Any],
    config: Config,
    digests: Mapping[str, Digests],
    num_seen: Optional[int] = None,
) -> list[Any]:
    """Returns the rows with their reference log-probabilities, from the disk if they were kept.

    digests: as `digests_of_files`. num_seen: how many of the rows will be asked for, None for all. The same
    model, adapter, rows and arithmetic are scored once.
    """
    path = _cache_folder() / f"{_key(objective, rows, config, digests)}{_SUFFIX}"
    values = _kept(path, len(rows))
    if values is not None:
        log.info("reference log-probabilities of %d rows: as kept in %s", len(rows), path)
    else:
        values = _score_and_keep(objective, view, list(rows), config, path, num_seen)
    return [replace(row, ref_logps=tuple(both)) for row, both in zip(rows, values, strict=True)]


def _score_and_keep(
    objective, view: DecoderView, rows: list[Any], config: Config, path: Path, num_seen: Optional[int]
) -> np.ndarray:
    """Returns the reference's values (N, 2) float32 in the order of the rows.

    They are kept at the end, and now and then before it, so that a run that is stopped does not score rows
    again. Batches are the same in each run, and so are their values.
    """
    unfinished = path.with_suffix(".unfinished" + _SUFFIX)
    values = _kept(unfinished, len(rows))
    if values is None:
        values = np.full((len(rows), 2), np.nan, np.float32)
    place = {id(row): index for index, row in enumerate(rows)}
    batches = [[place[id(row)] for row in batch] for batch in fixed_batches(rows, config.data.batch_size)]
    left = [batch for batch in batches if np.isnan(values[batch]).any()]
    _announce(len(rows), sum(map(len, left)), num_seen)
    kept_at = time.monotonic()
    try:
        for batch in followed(left, "reference log-probabilities"):
            values[batch] = objective.reference_logps(view, [rows[index] for index in batch])
            if time.monotonic() - kept_at > _SECONDS_UNKEPT:
                _keep(unfinished, values)
                kept_at = time.monotonic()
                log.info("  %d of %d so far", np.count_nonzero(~np.isnan(values[:, 0])), len(rows))
    except BaseException:
        _keep(unfinished, values)
        raise
    _keep(path, values)
    with suppress(OSError):  # what cannot be written cannot be left over either
        unfinished.unlink()
    log.info("reference log-probabilities of %d rows: kept in %s", len(rows), path.parent)
    return values


def _announce(num_rows: int, num_left: int, num_seen: Optional[int]) -> None:
    begun = f", {num_rows - num_left:,} of them before" * (num_left < num_rows)
    hint = ""
    if num_seen is not None and num_seen < num_rows / 2:
        hint = f"; this run sees {num_seen:,} of them: loss.reference_scored=every_step scores no more"
    log.info("reference log-probabilities of %d rows: being computed once%s%s", num_rows, begun, hint)


def _key(objective, rows: list[Any], config: Config, digests: Mapping[str, Digests]) -> str:
    """Returns a name for what the values depend on, to the last bit.

    What the reference is: the contents of its files, and the adapter that a start without files draws from
    the seed. What it scores: the rows. How it adds up: a resumed run that lost what was kept has to find
    the same bits again, and another run that rounds otherwise must not be given them. That is the head,
    the layout, the rows of a batch, the type and place of the arithmetic, and nothing else: a key that
    had the loss or the optimiser too would score the same rows again for every beta and learning rate.
    """
    started = is_the_start(config)
    adapter = started and (replace(config.adapter, init_from=None), config.trainer.seed)
    of_what = (
        sorted(digests.get("loss.reference", digests["model.path"]).items()),
        sorted(digests.get("adapter.init_from", {}).items()),
        adapter,
        config.trainer.objective,
        rows_digest(rows),
    )
    if NEW_TOKENS in digests:
        of_what += (sorted(digests[NEW_TOKENS].items()),)
    how = (objective.head, objective.arranger, config.data.batch_size, config.model.dtype, backend())
    return hashlib.sha256(repr((_VERSION, of_what, how)).encode()).hexdigest()[:32]


def _cache_folder() -> Path:
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "mlxft" / "reference"


def _kept(path: Path, num_rows: int) -> Optional[np.ndarray]:
    """Returns the values (N, 2) that were kept, or None: not there, or damaged, and so computed again."""
    try:
        content = path.read_bytes()
    except OSError:
        return None
    digest, values = content[:_DIGEST_BYTES], content[_DIGEST_BYTES:]
    if hashlib.sha256(values).digest() != digest or len(values) != num_rows * 2 * 4:
        log.warning("the reference log-probabilities kept in %s are damaged, and computed anew", path)
        return None
    return np.frombuffer(values, np.float32).reshape(num_rows, 2).copy()


def _keep(path: Path, values: np.ndarray) -> None:
    """Writes a digest and the values for later runs; where that cannot be, this run has them all the same."""
    content = values.tobytes()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        aside = path.with_name(f".{path.stem}.{os.getpid()}")
        with open(aside, "wb") as file:
            file.write(hashlib.sha256(content).digest() + content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, path)
    except OSError as error:
        log.warning("reference log-probabilities are not kept for later: %s", error)
