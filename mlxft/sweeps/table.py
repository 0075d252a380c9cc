"""A sweep as a table: what varied, how each job ended, the best one first, and why others failed."""

from rich import box
from rich.console import Console
from rich.table import Table

from mlxft.sweeps.grid import Job
from mlxft.sweeps.store import Result, Store


def show(store: Store, metric: str, goal: str) -> None:
    """Prints the table to standard output, and under it the reasons of what failed."""
    console = Console()
    jobs = ranked(store, goal)
    keys = list(dict.fromkeys(key for job, _ in jobs for key in job.varied))
    table = Table(box=box.SIMPLE_HEAD, title=f"sweep {store.folder}", title_justify="left")
    for heading in ("job", *keys, "ended", metric, "steps", "seconds"):
        number = heading in (metric, "steps", "seconds")
        table.add_column(heading, justify="right" if number else "left", overflow="fold")
    for job, result in jobs:
        varied = [job.shown.get(key, "") for key in keys]
        table.add_row(job.name.partition("_")[0], *varied, *_cells(result))
    console.print(table)
    for job, result in jobs:
        if result is not None and result.is_failed:
            print(f"{job.name}: {result.why or result.status}\n  all it printed: {store.log(job)}")


def ranked(store: Store, goal: str) -> list[tuple[Job, Result | None]]:
    """Returns the jobs with their results, the best one first, those without a value last."""
    sign = 1 if goal == "min" else -1

    def order(pair: tuple[Job, Result | None]):
        job, result = pair
        value = result.value if result else None
        return (value is None, sign * (value or 0.0), job.number)

    return sorted(((job, store.results.get(job.name)) for job in store.jobs), key=order)


def _cells(result: Result | None) -> tuple[str, ...]:
    if result is None:
        return "not begun", "", "", ""
    value = "" if result.value is None else f"{result.value:.4g}"
    return result.status, value, str(result.steps), f"{result.seconds:.0f}"
