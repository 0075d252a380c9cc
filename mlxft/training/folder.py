"""A run's folder: where it is, that only one process writes it, and what a resume continues."""

import fcntl
import logging
import time
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Optional

import yaml

from mlxft.errors import InputError
from mlxft.training.checkpoint import Checkpoint, CheckpointStore, read

log = logging.getLogger("mlxft")

CONFIG = "config.yaml"
ROOT = Path("runs")

# Keys that say where and whether, not what: they may differ between a run and its continuation.
_PLACE_KEYS = ("run.dir", "trainer.resume")
# Keys without which the rows, the arrays or the optimiser's state would not be the checkpoint's.
_FIXED_KEYS = (
    "model.",
    "data.train",
    "data.format",
    "data.max_length",
    "data.truncate",
    "data.batch_size",
    "data.shuffle",
    "data.train_on",
    "data.columns",
    "trainer.objective",
    "trainer.seed",
    "trainer.accumulate",
    "adapter.",
    "optimizer.name",
)


@dataclass(frozen=True)
class Start:
    """Where a run begins. checkpoint: what it continues, None for a fresh run."""

    run_dir: Path
    checkpoint: Optional[Checkpoint] = None

    @property
    def from_run(self) -> Path:
        """The folder of the run whose checkpoint is continued."""
        return self.checkpoint.folder.parent.parent

    @property
    def copies_metrics(self) -> bool:
        """True where the run continues another folder's checkpoint in a folder of its own."""
        return self.checkpoint is not None and self.from_run != self.run_dir.resolve()


def find_start(name: str, config: dict[str, Any]) -> Start:
    """Returns where the run called `name` with this configuration begins.

    Raises: InputError for a run.dir that holds a run already, a resume that does not exist, only
    damaged checkpoints, or a configuration that cannot continue the checkpoint.
    """
    resume = config["trainer"]["resume"]
    given = Path(config["run"]["dir"]) if config["run"]["dir"] else None
    if resume == "none":
        return Start(_fresh(given, name))
    start = _auto(given, name, config) if resume == "auto" else _from_path(Path(resume), given, name)
    if start.checkpoint is not None:
        _check_same(start.checkpoint, config)
    return start


def _fresh(given: Optional[Path], name: str) -> Path:
    if given is None:
        return _new_folder(name)
    if (given / CONFIG).exists() or (given / "checkpoints").exists():
        raise InputError(
            f"run.dir={given} holds a run already. trainer.resume=auto continues it; "
            "another run.dir keeps both"
        )
    return given


def _new_folder(name: str) -> Path:
    stem = ROOT / name / time.strftime("%Y-%m-%d_%H-%M-%S")
    folder, number = stem, 2
    while folder.exists():
        folder, number = stem.with_name(f"{stem.name}-{number}"), number + 1
    return folder


def _auto(given: Optional[Path], name: str, config: dict[str, Any]) -> Start:
    run_dir = given or _newest_same(name, config)
    checkpoint = CheckpointStore(run_dir).latest() if run_dir else None
    if checkpoint is not None:
        return Start(run_dir, checkpoint)
    where = given or ROOT / name
    log.info("trainer.resume=auto: no checkpoint to continue in %s, starting afresh", where)
    return Start(given or _new_folder(name))


def _newest_same(name: str, config: dict[str, Any]) -> Optional[Path]:
    """The newest run of the name whose configuration is the same, places aside."""
    wanted = _flat(config)
    for path in sorted((ROOT / name).glob(f"*/{CONFIG}"), key=lambda p: p.stat().st_mtime, reverse=True):
        found = _flat(yaml.safe_load(path.read_text(encoding="utf-8")))
        if not _differences(wanted, found) and (path.parent / "checkpoints").exists():
            return path.parent
    return None


def _from_path(path: Path, given: Optional[Path], name: str) -> Start:
    """A run's folder (its newest whole checkpoint) or one checkpoint's folder."""
    if not path.is_dir():
        raise InputError(
            f"trainer.resume={path}: there is no such folder. Give a run's folder, "
            "one of its checkpoints/step-... folders, or auto"
        )
    if (path / "checkpoints").is_dir():
        newest = checkpoint = CheckpointStore(path).latest()
        run_dir = path
    else:
        checkpoint = read(path)
        run_dir = checkpoint.folder.parent.parent
        newest = CheckpointStore(run_dir).latest()
    if checkpoint is None:
        raise InputError(f"trainer.resume={path}: the run has no checkpoint yet")
    # Going on from an older checkpoint, or elsewhere, must not overwrite what came after it.
    if given is not None and given.resolve() != run_dir.resolve():
        return Start(_fresh(given, name), checkpoint)
    if newest.step != checkpoint.step:
        return Start(_new_folder(name), checkpoint)
    return Start(run_dir, checkpoint)


def _check_same(checkpoint: Checkpoint, config: dict[str, Any]) -> None:
    before = _flat(checkpoint.state["config"])
    now = _flat(config)
    changed = _differences(now, before)
    fixed = [key for key in changed if key.startswith(_FIXED_KEYS)]
    if fixed:
        lines = "\n".join(
            f"  {key}: {before.get(key)!r} in the checkpoint, {now.get(key)!r} now" for key in fixed
        )
        raise InputError(
            f"{checkpoint.folder} was trained with other settings and cannot be continued with "
            f"these:\n{lines}\nSet them back, or start a new run with adapter.init_from="
            f"{checkpoint.folder}"
        )
    for key in changed:
        log.warning(
            "resuming with %s=%s (was %s): the run will differ from one never stopped",
            key,
            now.get(key),
            before.get(key),
        )


def _flat(tree: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(tree, dict) or (prefix and not tree):
        return {prefix: tree}
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        flat.update(_flat(value, f"{prefix}.{key}" if prefix else str(key)))
    return flat


def _differences(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    keys = sorted(set(one) | set(other))
    return [key for key in keys if key not in _PLACE_KEYS and one.get(key) != other.get(key)]


@contextmanager
def locked(run_dir: Path):
    """Holds the run's lock within the block; the system drops it when the process ends, however it ends.

    Raises: InputError if another process trains in the folder, or the folder cannot be written.
    """
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        file = open(run_dir / ".lock", "w")
    except OSError as error:
        raise InputError(
            f"run.dir={run_dir} cannot be written ({error.strerror}). Choose another run.dir"
        ) from None
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise InputError(
                f"another process trains in {run_dir} now. Wait for it, or choose another run.dir"
            ) from None
        yield
