"""Checkpoints that are either whole or not there: written aside, synced, hashed, then renamed.

    checkpoints/step-000010/
        adapters.safetensors, adapter_config.json   the trained arrays, in mlx-lm's layout; the tokenizer
                                                    too where the model has new tokens
        optimizer.safetensors                       the optimiser's state
        state.json                                  step, counts, best validation so far, what was trained on
        manifest.json                               size and SHA-256 of each file above
    checkpoints/last -> step-000010

A kill at any point leaves either the folder under a name starting with a dot, which nothing reads, or
all of it. What randomness a run needs is a pure function of its seed and step, so no generator is saved.
"""

import hashlib
import json
import logging
import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable, Optional, Union

import mlx.core as mx

from mlxft.errors import InputError
from mlxft.training.disk import disk_guard, sync_folder, write_arrays, write_json

log = logging.getLogger("mlxft")

MANIFEST = "manifest.json"
ADAPTER = "adapters.safetensors"
OPTIMIZER = "optimizer.safetensors"
STATE = "state.json"

_NAME = re.compile(r"step-(\d+)")


@dataclass(frozen=True)
class Checkpoint:
    """A verified checkpoint. state: what state.json holds; None of it has been applied yet."""

    folder: Path
    state: dict[str, Any]

    @property
    def step(self) -> int:
        """Optimiser steps done when it was written."""
        return self.state["step"]

    @property
    def run_dir(self) -> Optional[Path]:
        """The run it belongs to, None for a folder that was taken out of its run."""
        return self.folder.parent.parent if self.folder.parent.name == "checkpoints" else None

    @property
    def has_optimizer(self) -> bool:
        """Whether training can go on from it, not only an adapter be taken."""
        return (self.folder / OPTIMIZER).exists()

    def arrays(self, name: str) -> dict[str, mx.array]:
        """Returns the arrays of ADAPTER or OPTIMIZER by name. Raises: InputError if the file has gone."""
        try:
            return mx.load(str(self.folder / name))
        except RuntimeError as error:  # between its check and now the run that owns it may remove it
            raise InputError(f"{self.folder} can no longer be read: {error}") from None


class CheckpointStore:
    """The checkpoints of one run. keep: how many of the newest stay, or "all"."""

    def __init__(self, run_dir: Path, keep: Union[int, str] = 2):
        self.root = run_dir / "checkpoints"
        self.keep = keep

    def save(
        self,
        state: dict[str, Any],
        optimizer: Optional[dict[str, mx.array]],
        write_adapter: Callable[[Path], None],
    ) -> Path:
        """Writes the checkpoint of `state["step"]` and returns its folder.

        Raises: GuardStop if the disk takes no more; older checkpoints are as they were.
        """
        final = self.folder(state["step"])
        aside = self.root / f".{final.name}.{os.getpid()}"
        with disk_guard(f"the checkpoint of step {state['step']} in {self.root}"):
            try:
                self._remove_leftovers()
                aside.mkdir(parents=True)
                write_adapter(aside)
                if optimizer is not None:
                    write_arrays(aside / OPTIMIZER, optimizer)
                write_json(aside / STATE, state)
                _write_manifest(aside)
                self._publish(aside, final)
            except BaseException:
                shutil.rmtree(aside, ignore_errors=True)
                raise
            self._retain(final)
        return final

    def _publish(self, aside: Path, final: Path) -> None:
        if final.exists():  # the same step again, after its checkpoint was found damaged
            shutil.rmtree(final)
        os.rename(aside, final)
        sync_folder(self.root)
        link = self.root / f".last.{os.getpid()}"
        link.unlink(missing_ok=True)
        link.symlink_to(final.name)
        os.replace(link, self.root / "last")
        sync_folder(self.root)

    def _retain(self, newest: Path) -> None:
        if self.keep == "all":
            return
        for old in self.folders()[: -self.keep]:
            if old != newest:
                shutil.rmtree(old)

    def _remove_leftovers(self) -> None:
        """Removes what a killed writer left; the run's lock makes sure that none is at work."""
        for leftover in self.root.glob(".*"):
            if leftover.is_symlink() or not leftover.is_dir():
                leftover.unlink()
            else:
                shutil.rmtree(leftover)

    def folder(self, step: int) -> Path:
        """Returns where the checkpoint of the step is, or would be."""
        return self.root / f"step-{step:06d}"

    def folders(self) -> list[Path]:
        """Returns the folders of checkpoints, oldest step first, damaged ones included."""
        found = [path for path in self.root.glob("step-*") if _NAME.fullmatch(path.name) and path.is_dir()]
        return sorted(found, key=_step_of)

    def latest(self) -> Optional[Checkpoint]:
        """Returns the newest checkpoint that is whole, or None if there never was one.

        A damaged one is passed over with a warning. Raises: InputError if all are damaged.
        """
        folders = self.folders()
        for folder in reversed(folders):
            try:
                return read(folder)
            except InputError as error:
                log.warning("passing over a damaged checkpoint: %s", error)
        if folders:
            raise InputError(
                f"all checkpoints in {self.root} are damaged ({len(folders)} found), so nothing "
                "can be resumed. Start anew in another run.dir, or with trainer.resume=none after "
                "removing this folder"
            )
        return None

    def has_later(self, step: int) -> bool:
        """Tells whether there is a whole checkpoint of a step after this one."""
        return any(_is_whole(folder) for folder in self.folders() if _step_of(folder) > step)


def _step_of(folder: Path) -> int:
    return int(folder.name.removeprefix("step-"))


def _is_whole(folder: Path) -> bool:
    try:
        read(folder)
    except InputError:
        return False
    return True


def read(folder: Path) -> Checkpoint:
    """Returns the checkpoint in `folder`, each file checked against the manifest.

    Raises: InputError naming the first file that is missing, short or changed.
    """
    folder = Path(folder).resolve()
    manifest = _read_object(folder, MANIFEST)
    for name, expected in manifest.items():
        path = folder / name
        if not isinstance(expected, dict) or not expected.keys() >= {"bytes", "sha256"}:
            raise InputError(f"{folder}: {MANIFEST} says nothing usable about {name}")
        if not path.is_file():
            raise InputError(f"{folder}: {name} is missing")
        if path.stat().st_size != expected["bytes"]:
            raise InputError(
                f"{folder}: {name} has {path.stat().st_size} bytes, {expected['bytes']} were written"
            )
        if _sha256(path) != expected["sha256"]:
            raise InputError(f"{folder}: {name} is not what was written (its SHA-256 differs)")
    return Checkpoint(folder, _read_object(folder, STATE))


def _read_object(folder: Path, name: str) -> dict[str, Any]:
    try:
        value = json.loads((folder / name).read_bytes())
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise InputError(f"{folder} is not a whole checkpoint: {name} cannot be read ({reason})") from None
    if not isinstance(value, dict):
        raise InputError(f"{folder} is not a whole checkpoint: {name} holds no JSON object")
    return value


def _write_manifest(folder: Path) -> None:
    files = sorted(path for path in folder.iterdir())
    write_json(
        folder / MANIFEST,
        {path.name: {"bytes": path.stat().st_size, "sha256": _sha256(path)} for path in files},
    )
    sync_folder(folder)


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
