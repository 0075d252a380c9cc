"""A run's folder: where it is, that only one process writes it, its log, and what a resume continues."""

import logging
import os
import time
from collections.abc import Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Optional

import yaml

from mlxft.errors import InputError
from mlxft.training.checkpoint import Checkpoint, CheckpointStore, read
from mlxft.training.hold import CONFIG, LOCK, LOG, Taken, is_taken, locked, logged
from mlxft.training.resume import Continuation, same_training, settings

log = logging.getLogger("mlxft")

SUMMARY = "summary.json"
ROOT = Path("runs")

# What does not make a folder somebody's: of a run that never got far, and what systems put anywhere.
_NOBODYS = (LOCK, LOG, ".DS_Store", "lost+found")
# What a run leaves: a folder that has one of these holds a run, or something of another program's.
_LEFT_BY_A_RUN = (CONFIG, "checkpoints", "metrics.jsonl", "adapter", "best", SUMMARY)


@dataclass(frozen=True)
class Start:
    """Where a run begins. continuation: the checkpoint that it continues, None for a fresh run."""

    run_dir: Path
    continuation: Optional[Continuation] = None

    @property
    def step(self) -> int:
        """Optimiser steps done before this run begins."""
        return self.continuation.checkpoint.step if self.continuation else 0

    @property
    def is_elsewhere(self) -> bool:
        """True where the run continues in its own folder what another one began."""
        return self.continuation is not None and (
            self.continuation.checkpoint.run_dir != self.run_dir.resolve()
        )

    @property
    def from_run(self) -> Optional[Path]:
        """The other run's folder, None if there is none or it is not known."""
        return self.continuation.checkpoint.run_dir if self.is_elsewhere else None


@contextmanager
def open_run(name: str, config: dict[str, Any]):
    """Gives the `Start` of the run called `name` with this configuration; its folder is held within.

    What mlxft says goes to the folder's train.log too. A run that ends before it has written its
    configuration leaves no folder behind.

    Raises: InputError for a run.dir that holds a run already, or something else, or cannot be written,
    another process in it, a resume that does not exist, only damaged checkpoints, or settings that
    cannot continue them.
    """
    resume = config["trainer"]["resume"]
    given = Path(config["run"]["dir"]) if config["run"]["dir"] else None
    with ExitStack() as held:
        if resume == "none":
            start = _fresh(given, name, held)
        elif resume == "auto":
            start = _auto(given, name, config, held)
        else:
            start = _from_path(Path(resume), given, name, config, held)
        yield start


def continued(name: str, config: dict[str, Any]) -> Optional[Continuation]:
    """Returns what a run of this name would continue, None for one that starts afresh; nothing is written.

    Raises: InputError as `open_run`, but for a folder that cannot be written or that a process is in.
    """
    resume = config["trainer"]["resume"]
    given = Path(config["run"]["dir"]) if config["run"]["dir"] else None
    if resume == "none":
        _refuse_what_is_there(given)
        return None
    if resume == "auto":
        run_dir = _to_continue(given, name, config)
        checkpoint = None if run_dir is None else CheckpointStore(run_dir).latest()
        if checkpoint is None:
            _refuse_what_has_ended(given)
            return None
    else:
        checkpoint = _checkpoint_at(Path(resume))
        if given is None or given.resolve() != checkpoint.run_dir:
            _refuse_what_is_there(given)
        elif CheckpointStore(given).has_later(checkpoint.step):
            raise _would_overwrite(given, Path(resume))
    return _checked(checkpoint, config)


def _refuse_what_is_there(given: Optional[Path]) -> None:
    if given is not None:
        _refuse_what_is_no_runs(given)
        _refuse_a_run(given, _is_a_runs(given))


def _fresh(given: Optional[Path], name: str, held: ExitStack) -> Start:
    """A run from its first step, in the folder that was given or a new one."""
    if given is None:
        return Start(_enter_new(name, held))
    was_a_runs = _is_a_runs(given)
    if not _holds_a_run(given) or was_a_runs:
        _refuse_what_is_no_runs(given)
        _enter(given, held)  # which tells of a process that is in it
    _refuse_a_run(given, was_a_runs)
    return Start(given)


def _refuse_a_run(given: Path, was_a_runs: bool) -> None:
    """Raises InputError for a folder with a run in it. was_a_runs: before this process entered it."""
    if _holds_a_run(given):
        how = ""
        if CheckpointStore(given).folders():
            how = "trainer.resume=auto continues it; "
        elif was_a_runs and not (given / SUMMARY).exists():
            how = "trainer.resume=auto starts it afresh, since it has no checkpoint; "
        raise InputError(f"run.dir={given} holds a run already. {how}another run.dir keeps both")


def _is_a_runs(folder: Path) -> bool:
    """A run leaves its lock from its first moment on: what stands without one is somebody's."""
    return os.path.exists(folder / LOCK)


def _refuse_what_is_no_runs(given: Path) -> None:
    """Raises InputError for a folder that is there, not empty and no run's: its files are not for us."""
    try:
        names = sorted(set(os.listdir(given)) - set(_NOBODYS))
    except PermissionError:
        raise InputError(f"run.dir={given}: what it holds cannot be read. Choose another run.dir") from None
    except OSError:  # not there yet, or nothing that can be: making it tells which
        return
    # A lock alone is not enough: another program may name a file so, and a run has more to show by then.
    if names and not (_is_a_runs(given) and (_holds_a_run(given) or is_taken(given))):
        what = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
        raise InputError(
            f"run.dir={given} is not the folder of a run: it holds {what}. Nothing was written there. Give a "
            f"folder that is new or empty, for instance run.dir={given / 'run'}"
        )


def _holds_a_run(folder: Path) -> bool:
    return any(os.path.exists(folder / left) for left in _LEFT_BY_A_RUN)


def _to_continue(given: Optional[Path], name: str, config: dict[str, Any]) -> Optional[Path]:
    """Returns the folder in which trainer.resume=auto looks for checkpoints, None for a run without any."""
    if given is not None and os.path.exists(given) and not CheckpointStore(given).folders():
        if _holds_a_run(given) and not _is_a_runs(given):
            raise InputError(
                f"run.dir={given} holds files that this would overwrite, and no checkpoint to continue. "
                "Another run.dir keeps them"
            )
        _refuse_what_is_no_runs(given)
    return given or _newest_same(name, config)


def _auto(given: Optional[Path], name: str, config: dict[str, Any], held: ExitStack) -> Start:
    run_dir = _to_continue(given, name, config)
    if run_dir is not None:
        _enter(run_dir, held)
        checkpoint = CheckpointStore(run_dir).latest()
        if checkpoint is not None:
            return Start(run_dir, _checked(checkpoint, config))
    _refuse_what_has_ended(given)
    start = Start(given or _enter_new(name, held))
    where = given or ROOT / name
    log.info("trainer.resume=auto: no checkpoint to continue in %s, starting afresh", where)
    return start


def _refuse_what_has_ended(given: Optional[Path]) -> None:
    if given is not None and (given / SUMMARY).exists():
        raise InputError(
            f"run.dir={given} holds a run that has ended, without a checkpoint to continue. Another "
            "run.dir keeps it"
        )


def _newest_same(name: str, config: dict[str, Any]) -> Optional[Path]:
    """The newest run of the name that has checkpoints and trains as this one would."""
    wanted = settings(config, Path.cwd())
    files = [path for path in (ROOT / name).glob(f"*/{CONFIG}") if CheckpointStore(path.parent).folders()]
    for path in sorted(files, key=lambda path: path.stat().st_mtime_ns, reverse=True):
        try:
            found = yaml.safe_load(path.read_text(encoding="utf-8"))
        except (ValueError, yaml.YAMLError) as error:
            log.warning("passing over %s: it cannot be read (%s)", path, str(error).partition("\n")[0])
            continue
        if isinstance(found, Mapping) and same_training(wanted, settings(found, Path.cwd())):
            return path.parent
    return None


def _from_path(
    path: Path, given: Optional[Path], name: str, config: dict[str, Any], held: ExitStack
) -> Start:
    checkpoint = _checkpoint_at(path)
    run_dir = checkpoint.run_dir
    if given is not None and (run_dir is None or given.resolve() != run_dir):
        place = _fresh(given, name, held).run_dir
    elif run_dir is not None and _enter_if_newest(run_dir, checkpoint, held):
        place = run_dir
    elif given is not None:
        raise _would_overwrite(given, path)
    else:
        place = _enter_new(name, held)
    return Start(place, _checked(checkpoint, config))


def _would_overwrite(given: Path, path: Path) -> InputError:
    return InputError(
        f"run.dir={given} holds later steps than {path}, which would be overwritten. Give another "
        "run.dir, or leave it out for a new folder"
    )


def _checkpoint_at(path: Path) -> Checkpoint:
    """Returns the newest whole checkpoint of a run's folder, or that of one checkpoint's folder."""
    if not os.path.isdir(path):
        raise InputError(
            f"trainer.resume={path}: there is no such folder. Give a run's folder, "
            "one of its checkpoints/step-... folders, or auto"
        )
    is_run = _is_a_runs(path) or (path / CONFIG).exists() or (path / "checkpoints").is_dir()
    checkpoint = CheckpointStore(path).latest() if is_run else read(path)
    if checkpoint is None and is_taken(path):
        raise InputError(
            f"trainer.resume={path}: a process trains in this run now, and there is no checkpoint yet. Wait "
            "for its first one"
        )
    if checkpoint is None:
        raise InputError(f"trainer.resume={path}: the run has no checkpoint yet")
    return checkpoint


def _enter_if_newest(run_dir: Path, checkpoint: Checkpoint, held: ExitStack) -> bool:
    """Going on from an older checkpoint must not overwrite what came after it."""
    with ExitStack() as own:
        _enter(run_dir, own)
        if CheckpointStore(run_dir).has_later(checkpoint.step):
            return False
        held.push(own.pop_all())
        return True


def _checked(checkpoint: Checkpoint, config: dict[str, Any]) -> Continuation:
    continuation = Continuation(checkpoint, config)
    continuation.check_settings()
    return continuation


def _enter_new(name: str, held: ExitStack) -> Path:
    """Makes and enters a folder named for the time; runs of the same second get numbers."""
    stem, number = ROOT / name / time.strftime("%Y-%m-%d_%H-%M-%S"), 1
    while True:
        folder = stem if number == 1 else stem.with_name(f"{stem.name}-{number}")
        number += 1
        if folder.exists():
            continue
        try:
            _enter(folder, held)
        except Taken:
            continue
        return folder


def _enter(run_dir: Path, held: ExitStack) -> None:
    held.enter_context(locked(run_dir))
    held.enter_context(logged(run_dir / LOG))
