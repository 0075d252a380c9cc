"""Checkpoints that are either whole or not there: written aside, synced, hashed, then renamed.

    checkpoints/step-000010/
        adapters.safetensors, adapter_config.json   the trained arrays, in mlx-lm's layout
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
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable, Optional, Union

import mlx.core as mx

from mlxft.errors import GuardStop, InputError

log = logging.getLogger("mlxft")

MANIFEST = "manifest.json"
OPTIMIZER = "optimizer.safetensors"
STATE = "state.json"


@dataclass(frozen=True)
class Checkpoint:
    """A verified checkpoint. state: what state.json holds; None of it has been applied yet."""

    folder: Path
    state: dict[str, Any]

    @property
    def step(self) -> int:
        return self.state["step"]

    def optimizer_arrays(self) -> dict[str, mx.array]:
        """Returns the optimiser's state by name.

        Raises: InputError for a checkpoint that was saved without one.
        """
        path = self.folder / OPTIMIZER
        if not path.exists():
            raise InputError(
                f"{self.folder} holds only the adapter (it was saved with "
                "trainer.save_only_adapter=true), so training cannot go on from it. "
                f"Start a new run from its weights with adapter.init_from={self.folder}"
            )
        return mx.load(str(path))


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
        final = self.root / f"step-{state['step']:06d}"
        aside = self.root / f".{final.name}.{os.getpid()}"
        try:
            self._remove_leftovers()
            aside.mkdir(parents=True)
            write_adapter(aside)
            if optimizer is not None:
                write_arrays(aside / OPTIMIZER, optimizer)
            write_json(aside / STATE, state)
            _write_manifest(aside)
            self._publish(aside, final)
        except OSError as error:
            shutil.rmtree(aside, ignore_errors=True)
            raise GuardStop(
                f"the checkpoint of step {state['step']} could not be written to {self.root}: "
                f"{error.strerror or error}. Earlier checkpoints are intact; free some space, then "
                "continue with trainer.resume=auto"
            ) from error
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

    def folders(self) -> list[Path]:
        """Returns the folders of checkpoints, oldest step first, damaged ones included."""
        return sorted(path for path in self.root.glob("step-*") if path.is_dir())

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


def read(folder: Path) -> Checkpoint:
    """Returns the checkpoint in `folder`, each file checked against the manifest.

    Raises: InputError naming the first file that is missing, short or changed.
    """
    folder = Path(folder).resolve()
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
    except (OSError, ValueError) as error:
        raise InputError(f"{folder} is not a whole checkpoint: {MANIFEST} cannot be read ({error})") from None
    for name, expected in manifest.items():
        path = folder / name
        if not path.is_file():
            raise InputError(f"{folder}: {name} is missing")
        if path.stat().st_size != expected["bytes"]:
            raise InputError(
                f"{folder}: {name} has {path.stat().st_size} bytes, {expected['bytes']} were written"
            )
        if _sha256(path) != expected["sha256"]:
            raise InputError(f"{folder}: {name} is not what was written (its SHA-256 differs)")
    return Checkpoint(folder, json.loads((folder / STATE).read_text()))


def write_arrays(path: Path, arrays: dict[str, mx.array]) -> None:
    """Writes arrays as safetensors and waits until the disk has them."""
    with open(path, "wb") as file:
        mx.save_safetensors(file, arrays, {"format": "mlx"})
        _sync(file)


def write_json(path: Path, value: Any) -> None:
    """Writes JSON and waits until the disk has it."""
    with open(path, "w", encoding="utf-8") as file:
        json.dump(value, file, indent=1)
        file.write("\n")
        _sync(file)


def sync_folder(folder: Path) -> None:
    """Waits until the disk has the names in `folder`."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _sync(file) -> None:
    file.flush()
    os.fsync(file.fileno())


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
