"""A sweep's folder: what was asked for, a folder for each job, and how each has ended so far.

    sweep.json      the arguments and every job, those that a search has chosen too
    results.json    by job: exit code, status, the value that is compared, seconds, why it failed
    logs/           what each job printed
    NAME/           each job's run
"""

import fcntl
import json
import math
import time
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Optional

from mlxft.errors import InputError
from mlxft.sweeps.grid import Job
from mlxft.training.disk import as_json, disk_guard, write_whole

ROOT = Path("runs") / "sweeps"
SWEEP, _RESULTS, _LOCK, LOGS = "sweep.json", "results.json", ".lock", "logs"
_LAST_LINES = 6  # of a failed job's output


@dataclass(frozen=True)
class Result:
    """How a job ended.

    status: completed, early_stopped, interrupted, stopped by a guard, wrong input, fault, killed by signal N.
    value: what is compared, None where it has none. why: the end of a failed job's output.
    """

    exit_code: int
    status: str
    value: Optional[float] = None
    steps: int = 0
    seconds: float = 0.0
    why: str = ""

    @property
    def is_done(self) -> bool:
        """True for a run that went to its end."""
        return self.exit_code == 0

    @property
    def is_failed(self) -> bool:
        """True for one that ended by itself before its end; an interrupted one goes on."""
        return self.exit_code != 0 and self.status != "interrupted"


class Store:
    """The folder of a sweep that is held by this process."""

    def __init__(self, folder: Path, sweep: dict[str, Any], results: dict[str, Result]):
        self.folder, self.sweep, self.results = folder, sweep, results

    @property
    def jobs(self) -> list[Job]:
        """All jobs that are known, in order."""
        return [Job(job["number"], tuple(job["arguments"]), job["varied"]) for job in self.sweep["jobs"]]

    def begin(self) -> None:
        """Writes what was asked for."""
        with disk_guard(self.folder / LOGS, then="begin again"):
            (self.folder / LOGS).mkdir(exist_ok=True)
        self._write()

    def add(self, job: Job) -> None:
        """Writes a job that a search has chosen down, before it begins."""
        self.sweep["jobs"].append(asdict(job))
        self._write()

    def run_dir(self, job: Job) -> Path:
        """Returns where the job's run is."""
        return self.folder / job.name

    def log(self, job: Job) -> Path:
        """Returns where what the job prints goes."""
        return self.folder / LOGS / f"{job.name}.log"

    def record(self, job: Job, exit_code: int, seconds: float, metric: str, goal: str) -> Result:
        """Writes down how a job ended, and returns it. seconds: of this attempt."""
        before = self.results.get(job.name)
        result = _read_result(self.run_dir(job), self.log(job), exit_code, metric, goal)
        total = seconds + (before.seconds if before and before.status == "interrupted" else 0.0)
        result = Result(**asdict(result) | {"seconds": total})
        self.results[job.name] = result
        content = {name: asdict(each) for name, each in self.results.items()}
        write_whole(self.folder / _RESULTS, as_json(content))
        return result

    def _write(self) -> None:
        write_whole(self.folder / SWEEP, as_json(self.sweep))


@contextmanager
def new(folder: Optional[Path], name: str, sweep: dict[str, Any]):
    """Gives the `Store` of a sweep that has not begun, in a folder that is new or empty.

    Raises: InputError for a folder with something in it, or that can't be written.
    """
    if folder is None:
        stem, number = ROOT / name / time.strftime("%Y-%m-%d_%H-%M-%S"), 1
        folder = stem
        while folder.exists():
            number += 1
            folder = stem.with_name(f"{stem.name}-{number}")
    elif (folder / SWEEP).exists():
        raise InputError(f"sweep.dir={folder} holds a sweep; sweep.resume={folder} continues it")
    elif folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise InputError(f"sweep.dir={folder} is not empty. Give a folder that is new")
    with _locked(folder):
        yield Store(folder, sweep, {})


@contextmanager
def existing(folder: Path):
    """Gives the `Store` of a sweep that was begun. Raises: InputError if there is none, or it is at work."""
    if not (folder / SWEEP).is_file():
        raise InputError(f"sweep.resume={folder}: there is no sweep (it would have a {SWEEP})")
    with _locked(folder):
        results = {}
        if (folder / _RESULTS).exists():
            results = {name: Result(**each) for name, each in _read(folder / _RESULTS).items()}
        yield Store(folder, _read(folder / SWEEP), results)


def newest(arguments: list[str]) -> Optional[Path]:
    """Returns the folder of the newest sweep of these arguments, or of any if there are none."""
    files = sorted(ROOT.glob(f"*/*/{SWEEP}"), key=lambda path: path.stat().st_mtime_ns, reverse=True)
    for path in files:
        if not arguments or _read(path)["arguments"] == arguments:
            return path.parent
    return None


def _read(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"{path} can't be read: {error}") from None


@contextmanager
def _locked(folder: Path):
    """Holds the folder: one process at a time runs a sweep."""
    new_folders = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = open(folder / _LOCK, "w")
    except OSError as error:
        raise InputError(f"{folder} can't be written: {error.strerror}") from None
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise InputError(f"another process runs the sweep in {folder} now; wait for it") from None
        try:
            yield
        finally:
            if not (folder / SWEEP).exists():  # it never began
                (folder / _LOCK).unlink()
                for made in new_folders:
                    made.rmdir()


_STATUS = {2: "wrong input", 3: "stopped by a guard"}


def _read_result(run_dir: Path, log: Path, exit_code: int, metric: str, goal: str) -> Result:
    """Returns what the run's own files say of it."""
    summary = _read(run_dir / "summary.json") if (run_dir / "summary.json").exists() else {}
    if exit_code == 0:
        status = summary.get("status", "completed")
    elif exit_code > 128:  # a signal that the run itself tells of: it has saved
        status = "interrupted"
    elif exit_code < 0:
        status = f"killed by signal {-exit_code}"
    else:
        status = _STATUS.get(exit_code, "fault")
    records = list(_records(run_dir / "metrics.jsonl"))
    steps = max((record.get("step", 0) for record in records), default=0)
    value = _best(records, metric, goal) if exit_code == 0 else None
    why = _end_of(log) if exit_code and status != "interrupted" else ""
    return Result(exit_code, status, value, steps, why=why)


def _records(path: Path):
    if path.exists():
        with open(path, encoding="utf-8") as file:
            for line in file:
                yield json.loads(line)


def _best(records: list[dict[str, Any]], metric: str, goal: str) -> Optional[float]:
    """Returns the best of a validation metric, or without validation the last one of training."""
    for kind, choose in (("valid", min if goal == "min" else max), ("train", lambda values: values[-1])):
        found = [record[metric] for record in records if record.get("kind") == kind and metric in record]
        found = [value for value in found if value is not None and math.isfinite(value)]
        if found:
            return choose(found)
    return None


def _end_of(log: Path) -> str:
    try:
        lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    except OSError:
        return ""
    for start, line in enumerate(lines):
        if line.startswith("mlxft: ") and len(lines) - start <= 2 * _LAST_LINES:
            return "\n".join(lines[start:])
    return "\n".join(lines[-_LAST_LINES:])
