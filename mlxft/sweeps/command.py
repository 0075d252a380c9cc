"""`mlxft train -m`: reads what varies, checks every run before the first one, and runs them."""

import logging
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from mlxft.config import compose
from mlxft.config.schema import SweepConfig
from mlxft.errors import EXIT_DONE, EXIT_FAULT, InputError
from mlxft.sweeps import store as stores
from mlxft.sweeps.controller import Controller
from mlxft.sweeps.grid import Axis, Job, product, take_apart
from mlxft.sweeps.launch import Launcher, LocalLauncher, SubmititLauncher
from mlxft.sweeps.search import Grid, OptunaSearch, Search
from mlxft.sweeps.store import Store
from mlxft.sweeps.table import show

log = logging.getLogger("mlxft")

# What may be another for a sweep that is continued.
_MAY_CHANGE = ("resume", "retry_failed", "trials", "jobs", "launcher", "submitit")
_MOST_TOLD = 3  # jobs whose problems are told


def main(arguments: list[str]) -> int:
    """Runs a sweep, or what is left of one. Returns 1 if a job failed.

    Raises: InputError if any of its runs would be refused, before one begins; Interrupted.
    """
    own = [argument for argument in arguments if _is_sweeps(argument)]
    arguments = [argument for argument in arguments if not _is_sweeps(argument)]
    settings = compose(own, "sweep").own.sweep
    if settings.resume == "none":
        begun = {"arguments": arguments, "settings": asdict(settings), "jobs": _jobs(settings, arguments)}
        opened = stores.new(settings.dir and Path(settings.dir), _name(arguments), begun)
    else:
        opened = stores.existing(_to_continue(settings, arguments))
    with opened as store:
        settings = _continued(store, settings, own, arguments)
        search, launcher = _search(store, settings), _launcher(store, settings)
        store.begin()
        log.info("sweep: %s", store.folder)
        try:
            Controller(store, search, launcher, settings).run()
        finally:
            show(store, settings.metric, settings.goal)
        failed = any(result.is_failed for result in store.results.values())
    return EXIT_FAULT if failed else EXIT_DONE


def _is_sweeps(argument: str) -> bool:
    return argument.lstrip("+").partition("=")[0].partition(".")[0] == "sweep"


def _to_continue(settings: SweepConfig, arguments: list[str]) -> Path:
    folder = stores.newest(arguments) if settings.resume == "auto" else Path(settings.resume)
    if folder is None:
        raise InputError(f"sweep.resume=auto: there is no sweep of these arguments in {stores.ROOT}")
    return folder


def _continued(store: Store, settings: SweepConfig, own: list[str], arguments: list[str]) -> SweepConfig:
    """Returns the settings, of a sweep that is continued those it began with but for what may change.

    Raises: InputError for arguments or settings that are not the sweep's.
    """
    if settings.resume == "none":
        return settings
    if arguments and arguments != store.sweep["arguments"]:
        began = " ".join(store.sweep["arguments"])
        raise InputError(f"{store.folder} is the sweep of other arguments: {began}. Leave yours out")
    begun = SweepConfig(**store.sweep["settings"])
    given = {argument.lstrip("+").partition("=")[0].partition(".")[2] for argument in own} - {""}
    for name in sorted(given):
        if name not in _MAY_CHANGE and getattr(settings, name) != getattr(begun, name):
            raise InputError(f"sweep.{name}: the sweep began with {getattr(begun, name)!r}, and goes on so")
    return replace(begun, **{name: getattr(settings, name) for name in given & set(_MAY_CHANGE)})


def _varied(settings: SweepConfig, arguments: list[str]) -> tuple[list[str], list[Axis]]:
    """Returns what all runs share, and the keys that vary: those of sweep.params, unless typed."""
    params = [f"{name}={values}" for name, values in settings.params.items()]
    return take_apart([*params, *arguments])


def _jobs(settings: SweepConfig, arguments: list[str]) -> list[dict[str, Any]]:
    """Returns a new sweep's jobs as they are kept; a search has none yet.

    Raises: InputError if one of them would be refused.
    """
    shared, axes = _varied(settings, arguments)
    _refuse(shared, axes)
    if settings.search == "optuna":
        _check([Job(0, (*shared, *_first_values(axes)), {})])
        return []
    jobs = product(shared, axes)
    _check(jobs)
    return [asdict(job) for job in jobs]


def _search(store: Store, settings: SweepConfig) -> Search:
    """Returns what gives the jobs that have not ended."""
    if settings.search == "optuna":
        if settings.retry_failed:
            raise InputError("sweep.retry_failed: Optuna has counted them; raise sweep.trials for more")
        return OptunaSearch(store, *_varied(settings, store.sweep["arguments"]), settings)
    left = _left(store, settings)
    _check(left)
    return Grid(left)


def _left(store: Store, settings: SweepConfig) -> list[Job]:
    """Returns the jobs that have not ended, and those that failed if they are to be tried again."""
    left = []
    for job in store.jobs:
        result = store.results.get(job.name)
        if result is None or result.status == "interrupted" or (settings.retry_failed and result.is_failed):
            left.append(job)
    return left


def _name(arguments: list[str]) -> str:
    """Returns what the sweep's folder is called: the recipe's name, or the objective's, or "sweep"."""
    given = dict(argument.lstrip("+").partition("=")[::2] for argument in arguments)
    names = (given.get(key, "") for key in ("recipe", "trainer", "trainer.objective"))
    return next((name for name in names if name.isidentifier()), "sweep")


def _refuse(shared: list[str], axes: list[Axis]) -> None:
    """Raises: InputError for what makes no sense for several runs."""
    given = {argument.lstrip("+").partition("=")[0]: argument for argument in shared}
    given |= {axis.name: axis.name for axis in axes}
    for key, why in (
        ("run.dir", "each job has a folder of its own in the sweep's; sweep.dir names that"),
        ("trainer.resume", "jobs go on by themselves; sweep.resume continues a sweep"),
        ("trainer.dry_run", "a dry run leaves nothing to compare"),
    ):
        if key in given:
            raise InputError(f"{key}: {why}")
    if not axes:
        raise InputError(
            "nothing varies; give a key several values, optimizer.lr=1e-4,3e-4, or leave -m out for one run"
        )


def _first_values(axes: list[Axis]) -> list[str]:
    """Returns a value of each axis, for a check before a search begins."""
    values = []
    for axis in axes:
        if axis.sweep.is_interval_sweep():
            values.append(f"{axis.plus}{axis.name}={axis.sweep.value().start}")
        else:
            values.append(axis.assignments()[0])
    return values


def _check(jobs: list[Job]) -> None:
    """Raises: InputError with what is wrong with any of the runs, or if two are the same."""
    problems: dict[str, list[Job]] = {}
    seen: dict[str, Job] = {}
    for job in jobs:
        try:
            text = repr(compose(list(job.arguments)).config)
        except InputError as error:
            problems.setdefault(str(error), []).append(job)
            continue
        if text in seen:
            raise InputError(f"{seen[text]} and {job} are the same run; leave one of them out")
        seen[text] = job
    if problems:
        told = []
        for text, of in list(problems.items())[:_MOST_TOLD]:
            which = "" if len(of) == len(jobs) else f"{of[0]}{' and others' if len(of) > 1 else ''}: "
            told.append(which + text)
        raise InputError("\n".join(told))


def _launcher(store: Store, settings: SweepConfig) -> Launcher:
    if settings.launcher == "submitit":
        return SubmititLauncher(store.folder / stores.LOGS / "submitit", settings.submitit)
    return LocalLauncher(settings.jobs)
