"""Which job comes next: every combination, or what Optuna makes of the results so far."""

import math
from typing import Any, Optional, Protocol

from mlxft.errors import InputError
from mlxft.sweeps.grid import Axis, Job
from mlxft.sweeps.store import Result, Store

_JOURNAL = "optuna.journal"


class Search(Protocol):
    """Gives jobs and hears how they ended."""

    def next(self) -> Optional[Job]:
        """Returns a job that has not run yet, None when there are no more."""

    def tell(self, job: Job, result: Result) -> None:
        """Hears of a job that has ended."""


class Grid:
    """Jobs that are known from the start."""

    def __init__(self, jobs: list[Job]):
        self._left = list(jobs)

    def next(self) -> Optional[Job]:
        """Returns the first that is left."""
        return self._left.pop(0) if self._left else None

    def tell(self, job: Job, result: Result) -> None:
        """A grid is what it is."""


class OptunaSearch:
    """Trials of an Optuna study, kept in the sweep's folder: a sweep that is continued goes on with it.

    Each trial has a sampler seeded by its number: what is chosen follows from the seed and the results
    before it, not from how often the sweep was interrupted.
    """

    def __init__(self, store: Store, shared: list[str], axes: list[Axis], settings: Any):
        self._optuna = _optuna()
        self._store, self._shared, self._axes, self._settings = store, shared, axes, settings
        self._distributions = {axis.name: _distribution(axis, self._optuna) for axis in axes}
        storages = self._optuna.storages
        journal = storages.journal.JournalFileBackend(str(store.folder / _JOURNAL))
        self._study = self._optuna.create_study(
            storage=storages.JournalStorage(journal),
            study_name="sweep",
            direction="minimize" if settings.goal == "min" else "maximize",
            load_if_exists=True,
        )
        self._unfinished = [job for job in store.jobs if not _has_ended(store.results.get(job.name))]
        for job in store.jobs:  # ended, but the study had not heard of it
            if job not in self._unfinished:
                self.tell(job, store.results[job.name])

    def next(self) -> Optional[Job]:
        """Returns a job that was begun and not ended, else that of a new trial."""
        if self._unfinished:
            return self._unfinished.pop(0)
        number = len(self._store.jobs)
        if number >= self._settings.trials:
            return None
        several = self._settings.jobs > 1
        self._study.sampler = self._optuna.samplers.TPESampler(
            seed=self._settings.seed + number, constant_liar=several
        )
        trial = self._study.ask(self._distributions)
        varied = {name: _written(value) for name, value in trial.params.items()}
        plus = {axis.name: axis.plus for axis in self._axes}
        chosen = [f"{plus[name]}{name}={value}" for name, value in varied.items()]
        job = Job(trial.number, (*self._shared, *chosen), varied)
        self._store.add(job)
        return job

    def tell(self, job: Job, result: Result) -> None:
        """Tells the study: what a guard stopped is the worst there is, any other failure says nothing."""
        state = self._optuna.trial.TrialState
        trial = self._study.get_trials(deepcopy=False)[job.number]
        if trial.state.is_finished() or result.status == "interrupted":
            return
        worst = math.inf if self._settings.goal == "min" else -math.inf
        if result.is_done and result.value is not None:
            self._study.tell(job.number, result.value)
        elif result.exit_code == 3:
            self._study.tell(job.number, worst)
        else:
            self._study.tell(job.number, state=state.FAIL)


def _has_ended(result: Optional[Result]) -> bool:
    return result is not None and (result.is_done or result.is_failed)


def _optuna() -> Any:
    try:
        import optuna
    except ImportError:
        raise InputError("sweep.search=optuna: Optuna is missing; install mlxft[sweep]") from None
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna


def _distribution(axis: Axis, optuna: Any) -> Any:
    """Returns what Optuna draws a key's values from; tag(log, interval(...)) is a logarithmic range."""
    of, sweep = optuna.distributions, axis.sweep
    value = sweep.value()
    is_log = "log" in getattr(value, "tags", ())
    try:
        if sweep.is_choice_sweep():
            return of.CategoricalDistribution([_plain(each) for each in sweep.sweep_iterator()])
        if sweep.is_range_sweep():
            whole = all(isinstance(end, int) for end in (value.start, value.stop, value.step))
            kind = of.IntDistribution if whole else of.FloatDistribution
            return kind(value.start, value.stop - value.step, step=value.step)  # Hydra's stop is left out
        if sweep.is_interval_sweep():
            whole = isinstance(value.start, int) and isinstance(value.end, int)
            kind = of.IntDistribution if whole else of.FloatDistribution
            return kind(value.start, value.end, log=is_log)
    except (TypeError, ValueError) as error:
        raise InputError(f"{axis.name}: {error}") from None
    raise InputError(f"{axis.name}: Optuna chooses from lists, choice(), range() and interval() only")


def _plain(value: Any) -> Any:
    """Returns a value that Optuna can keep: of lists and quoted texts their spelling."""
    return value if isinstance(value, bool | int | float | str) or value is None else str(value)


def _written(value: Any) -> str:
    """Returns a value as an argument has it."""
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)
