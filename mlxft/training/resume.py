"""What a run continues: whether a checkpoint fits its settings, weights, rows and adapter; putting it back.

A setting counts by what it comes to: a file by where it lies, a model by its weights too, rows by their
tokens, an adapter by the layers, rank and scale it has. Keys that a later version adds or drops do not
stand in the way.
"""

import json
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, Optional

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optimizers
from mlx.utils import tree_flatten, tree_unflatten
from omegaconf import MISSING

from mlxft.config.keys import flatten, keys_of
from mlxft.config.schema import Config, LoggerConfig
from mlxft.errors import InputError
from mlxft.models.fingerprint import CONFIG
from mlxft.models.lora import DEFAULT_RANK, AdapterReport
from mlxft.segmented.plan import GradientPlan
from mlxft.training.checkpoint import ADAPTER, OPTIMIZER, Checkpoint
from mlxft.training.loop import Progress
from mlxft.training.reference_files import is_start

log = logging.getLogger("mlxft")

Settings = dict[str, Any]
Weights = Mapping[str, Mapping[str, str]]  # digests of a model's files by name, by the key that names it

_PATHS = ("model.path", "data.train", "data.valid", "adapter.init_from")
# Without these the arrays, the optimiser's state or the order of the rows would not be the checkpoint's.
_FIXED = (
    "model.path",
    "model.revision",
    "model.dtype",
    "model.new_tokens",
    "model.new_special_tokens",
    "data.batch_size",
    "data.batch_tokens",
    "data.shuffle",
    "data.streaming",
    "data.buffer",
    "trainer.objective",
    "trainer.accumulate",
    "trainer.seed",
    "adapter.kind",
    "adapter.rank_by",
    "adapter.ranks",
    "optimizer.name",
)
# Judged by what came of them: the rows' tokens, the adapter's layers, rank and scale.
_OF_ROWS = (
    "data.train", "data.split", "data.revision", "data.subset", "data.format", "data.on_bad_row",
    "data.max_length", "data.truncate", "data.train_on", "data.columns",
)  # fmt: skip
_OF_ADAPTER = tuple(
    f"adapter.{key}"
    for key in (
        "rank",
        "alpha",
        "rslora",
        "targets",
        "layers",
        "modules_to_save",
        "init_from",
        "init_weights",
    )
)
_JUDGED_LATER = _OF_ROWS + _OF_ADAPTER + ("data.valid",)
# These say where, whether and how often something is written; training is the same with any of them.
_WITHOUT_EFFECT = (
    "run.dir",
    "data.cache",
    "data.num_workers",
    "trainer.resume",
    "trainer.keep",
    "trainer.save_every",
    "trainer.save_only_adapter",
    "trainer.log_memory",
    "trainer.memory_limit",
    "trainer.samples",
    "adapter.any_base",
    *(f"logger.{item.name}" for item in fields(LoggerConfig)),
)


def settings(config: Mapping[str, Any], folder: Path) -> Settings:
    """Returns the configuration as values that can be compared, by full key name.

    folder: where relative paths of `config` begin. A key that `config` does not have yet is at its
    default; one that this version does not have is left out.
    """
    keys = keys_of(Config)
    given = {name: value for name, value in flatten(config, keys).items() if name in keys}
    flat = {name: None if key.default == MISSING else key.default for name, key in keys.items()} | given
    for name in _PATHS:
        flat[name] = _located(flat[name], folder)
    if flat["adapter.kind"] != "full" and flat["adapter.init_from"] is None:
        flat["adapter.rank"] = flat["adapter.rank"] or DEFAULT_RANK
        flat["adapter.alpha"] = flat["adapter.alpha"] or 2 * flat["adapter.rank"]
    return json.loads(json.dumps(flat))  # lists for tuples, as a checkpoint has them


def _located(value: Any, folder: Path) -> Any:
    """Returns the full path of a file or folder that is there, anything else (a hub's id) as it is."""
    if isinstance(value, str):
        path = folder / value
        return str(path.resolve()) if path.exists() else value
    if isinstance(value, Mapping):  # a set of rows with keys of its own
        return {**value, "path": _located(value["path"], folder)}
    if isinstance(value, Sequence):
        located = [_located(item, folder) for item in value]
        return located[0] if len(located) == 1 else located
    return value


def same_training(one: Settings, other: Settings) -> bool:
    """Tells whether two runs train the same way, wherever they write."""
    return set(_changed(one, other)) <= set(_WITHOUT_EFFECT)


def _changed(one: Settings, other: Settings) -> list[str]:
    return [key for key in one if one[key] != other[key]]


def identity(
    config: Mapping[str, Any], weights: Weights, rows: Mapping[str, Optional[str]], report: AdapterReport
) -> Settings:
    """Returns what a checkpoint's state says of the run that wrote it, for the checks below."""
    said = {"config": config, "folder": str(Path.cwd())}
    return said | {"weights": weights, "rows": rows, "adapter": _adapter(report)}


def _adapter(report: AdapterReport) -> dict[str, Any]:
    layers = {"layers": sorted(report.targets), "modules": sorted(report.modules)}
    return {"rank": report.rank, "alpha": report.alpha} | layers


class Continuation:
    """A checkpoint against the run that is to continue it; each check raises InputError with both values."""

    def __init__(self, checkpoint: Checkpoint, config: Mapping[str, Any]):
        state = checkpoint.state
        if not {"config", "folder", "rows", "adapter"} <= state.keys():
            raise InputError(
                f"{checkpoint.folder} does not say what it was trained with, so it cannot be continued. "
                f"Start a new run from its weights with adapter.init_from={checkpoint.folder}"
            )
        self.checkpoint = checkpoint
        self._before = settings(state["config"], Path(state["folder"]))
        self._now = settings(config, Path.cwd())

    def plan(self) -> Optional[GradientPlan]:
        """Returns how the backward was run, None if the checkpoint does not say."""
        known = {field.name for field in fields(GradientPlan)}
        said = self.checkpoint.state.get("gradient")
        if not isinstance(said, Mapping) or set(said) != known:
            return None
        return GradientPlan(**said)

    def check_settings(self) -> None:
        """Refuses what can never fit, and warns of what makes the run another one."""
        if not self.checkpoint.has_optimizer:
            raise InputError(
                f"{self.checkpoint.folder} holds only the adapter (it was saved with "
                "trainer.save_only_adapter=true), so training cannot go on from it. "
                f"Start a new run from its weights with adapter.init_from={self.checkpoint.folder}"
            )
        changed = _changed(self._now, self._before)
        fixed = [key for key in changed if key in _FIXED or self._is_plain_rank(key)]
        if fixed:
            self._refuse("was trained with other settings", fixed)
        for key in changed:
            if key == "adapter.init_from":
                self._tell_of_init_from()
            elif key not in _JUDGED_LATER + _WITHOUT_EFFECT:
                log.warning(
                    "resuming with %s=%s (was %s): the run will differ from one never stopped",
                    key,
                    self._now[key],
                    self._before[key],
                )

    def _tell_of_init_from(self) -> None:
        """Of a changed name: what it stands for is compared with the files, by `check_weights`."""
        if not self._begins_reference():
            log.warning("resuming: adapter.init_from has no effect, the checkpoint has its weights")
        elif not self._knows_files("adapter.init_from"):
            log.warning("resuming with another adapter.init_from: another reference, if it is not a copy")

    def _begins_reference(self) -> bool:
        """Tells whether the reference is, and was, what training began with."""
        keys = ("trainer.objective", "loss.reference", "adapter.kind")
        return all(is_start(*(settings[key] for key in keys)) for settings in (self._now, self._before))

    def _knows_files(self, key: str) -> bool:
        """Tells whether the checkpoint says what the key's files were; an earlier version's does not."""
        known = self.checkpoint.state.get("weights", {})
        return key in known or (bool(known) and self._before[key] is None)

    def _is_plain_rank(self, key: str) -> bool:
        known = self._now[key] is not None and self._before[key] is not None
        return key in ("adapter.rank", "adapter.alpha") and known

    def check_weights(self, weights: Weights) -> None:
        """Compares the files of the base model, and of what the reference is made of."""
        before = self.checkpoint.state.get("weights", {})
        for key in ("model.path", "loss.reference"):
            if self._now[key] == self._before[key] and key in before and key in weights:
                names = _differing(before[key], weights[key])
                what = f"{key}={self._now[key]} has other files now ({names})"
                if names and key == "loss.reference":
                    log.warning("resuming: %s; the run will differ from one never stopped", what)
                elif names:
                    of_others = " adapter.any_base=true"
                    self._refuse_files(f"was trained on a model that has changed since: {what}", of_others)
        key = "adapter.init_from"
        if self._begins_reference() and self._knows_files(key):
            names = _differing(before.get(key, {}), weights.get(key, {}))
            if names:
                what = f"{key}={self._now[key]} (was {self._before[key]}) has other files ({names})"
                self._refuse_files(f"was trained against a reference that would change: {what}")

    def _refuse_files(self, what: str, also: str = "") -> None:
        folder = self.checkpoint.folder
        raise InputError(
            f"{folder} {what}. Put them back, or start a new run from what it had learnt with "
            f"adapter.init_from={folder}{also}"
        )

    def check_rows(self, rows: Mapping[str, Optional[str]]) -> None:
        """Compares digests of the rows: {"train": ..., "valid": ...}."""
        before = self.checkpoint.state["rows"]
        if rows["train"] != before["train"]:
            self._refuse("was trained on rows with other tokens", self._among(_OF_ROWS))
        if rows["valid"] != before["valid"]:
            log.warning(
                "resuming with other rows in data.valid: their losses and the earlier ones don't compare"
            )

    def check_adapter(self, report: AdapterReport) -> None:
        """Compares what is trained now with what the checkpoint holds."""
        # An earlier version's says nothing of modules that are trained whole: it had none.
        before, now = {"modules": []} | self.checkpoint.state["adapter"], _adapter(report)
        same_alpha = before["alpha"] == now["alpha"] or math.isclose(
            before["alpha"] or 0, now["alpha"] or 0, rel_tol=1e-6
        )
        if not same_alpha or any(before[name] != now[name] for name in ("rank", "layers", "modules")):
            self._refuse("holds an adapter of other layers, rank or scale", self._among(_OF_ADAPTER))

    def _among(self, keys: Sequence[str]) -> list[str]:
        return [key for key in _changed(self._now, self._before) if key in keys]

    def _refuse(self, what: str, keys: Sequence[str]) -> None:
        lines = [f"  {key}: {self._before[key]!r} in the checkpoint, {self._now[key]!r} now" for key in keys]
        lines = lines or ["  no setting has changed: the files they name have"]
        folder = self.checkpoint.folder
        raise InputError(
            f"{folder} {what} and cannot be continued with these:\n" + "\n".join(lines) + "\nSet them back, "
            f"or start a new run from its weights with adapter.init_from={folder}"
        )

    def restore(self, model: nn.Module, optimizer: optimizers.Optimizer) -> Progress:
        """Puts weights and optimiser back as they were when the checkpoint was written."""
        checkpoint = self.checkpoint
        weights, state = checkpoint.arrays(ADAPTER), checkpoint.arrays(OPTIMIZER)
        for theirs, ours in ((weights, model.trainable_parameters()), (state, optimizer.state)):
            _check_names(ours, theirs, checkpoint.folder)
        model.update(tree_unflatten(list(weights.items())))
        optimizer.state = tree_unflatten(list(state.items()))
        mx.eval(model.trainable_parameters(), optimizer.state)
        log.info("resumed from step %d (%s)", checkpoint.step, checkpoint.folder)
        known = {field.name for field in fields(Progress)} & checkpoint.state.keys()
        return Progress(**{name: checkpoint.state[name] for name in known})


def _differing(before: Mapping[str, str], now: Mapping[str, str]) -> str:
    """Returns the names of the files that are not the same; an earlier version looked at weights only."""
    unknown = {CONFIG} - before.keys()
    names = sorted({name for name, _ in before.items() ^ now.items()} - unknown)
    return ", ".join(names[:4])


def _check_names(ours: Any, theirs: Mapping[str, mx.array], folder: Path) -> None:
    expected = {name: tuple(array.shape) for name, array in tree_flatten(ours)}
    found = {name: tuple(array.shape) for name, array in theirs.items()}
    if expected != found:
        odd = sorted(set(expected.items()) ^ set(found.items()))[:6]
        raise InputError(f"{folder} holds other arrays than this run would train, for instance {odd}")
