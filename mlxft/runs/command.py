"""`mlxft runs`: lists, compares and deletes runs."""

import json
import operator
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml
from rich import box
from rich.console import Console
from rich.table import Table

from mlxft.config.keys import nearest
from mlxft.errors import EXIT_DONE, InputError
from mlxft.runs.found import RESULTS, SCHEMA, Run, find, order, read
from mlxft.runs.remove import check, delete
from mlxft.sizes import written

_CONDITION = re.compile(r"(?P<key>[\w.]+)(?P<sign><=|>=|!=|=|<|>)(?P<value>.*)", re.DOTALL)
_SIGNS: dict[str, Callable[[Any, Any], bool]] = {
    "=": operator.eq, "!=": operator.ne, "<": operator.lt, ">": operator.gt, "<=": operator.le,
    ">=": operator.ge,
}  # fmt: skip
_COLUMNS = ("status", "steps", "loss", "best_loss", "bytes")
# Where a run is and what follows it: different in every run, and of no use to compare.
_OWN = ("run.dir", "trainer.resume", "logger.group", "logger.name")


def main(arguments: list[str]) -> int:
    """Runs `mlxft runs ...`. Raises: InputError for words that mean nothing, or runs that are not there."""
    as_json, agreed = "--json" in arguments, "--yes" in arguments
    words = [word for word in arguments if word not in ("--json", "--yes")]
    if words[:1] == ["compare"]:
        compare(words[1:], as_json)
    elif words[:1] == ["delete"]:
        remove(words[1:], agreed)
    else:
        listing(words[1:] if words[:1] == ["list"] else words, as_json)
    return EXIT_DONE


def listing(words: list[str], as_json: bool) -> None:
    """Prints a line a run. words: folders, sort=KEY, and conditions as KEY=VALUE or KEY<VALUE."""
    places = [word for word in words if not _CONDITION.fullmatch(word)]
    conditions = [_CONDITION.fullmatch(word) for word in words if _CONDITION.fullmatch(word)]
    key, is_reversed = None, False
    tests = []
    for match in conditions:
        if match["key"] == "sort" and match["sign"] == "=":
            key, is_reversed = match["value"].removeprefix("-"), match["value"].startswith("-")
            _known(key)
        else:
            _known(match["key"])
            tests.append((match["key"], _SIGNS[match["sign"]], yaml.safe_load(match["value"])))
    runs = [run for run in find(places) if all(_holds(run.values(), *test) for test in tests)]
    if key:
        runs.sort(key=lambda run: order(run.values().get(key)), reverse=is_reversed)
    if as_json:
        print(json.dumps([{"run": str(run.folder)} | run.values() for run in runs]))
    elif not runs:
        print("no runs" + (" of that kind" if tests else " in runs/ yet"))
    else:
        more = [name for name, *_ in [(key,), *tests] if name and name not in _COLUMNS]
        _print_list(runs, list(dict.fromkeys(more)))


def _known(key: str) -> None:
    """Raises: InputError for a name that is neither a result nor a key."""
    known = [*RESULTS, *SCHEMA]
    if key not in known:
        near = nearest(key, known)
        hint = f"did you mean {near}? " if near else ""
        raise InputError(f"{key}: there is no such key; {hint}results are {', '.join(RESULTS)}")


def _holds(values: dict[str, Any], key: str, sign: Callable[[Any, Any], bool], wanted: Any) -> bool:
    value = values.get(key)
    wanted = _number(wanted) if isinstance(value, int | float) else wanted
    try:
        return bool(sign(value, wanted))
    except TypeError:  # of what is missing, or of another type
        return False


def _number(value: Any) -> Any:
    """Returns 1e-4 as a number: to YAML it is text."""
    try:
        return float(value)
    except (TypeError, ValueError):
        return value


def _print_list(runs: list[Run], more: list[str]) -> None:
    table = Table(box=box.SIMPLE_HEAD)
    for name in (*_COLUMNS, *more):
        table.add_column("size" if name == "bytes" else name, justify="right", no_wrap=True)
    table.add_column("run", overflow="fold")
    for run in runs:
        values = run.values()
        table.add_row(*(_shown(name, values.get(name)) for name in (*_COLUMNS, *more)), str(run.folder))
    Console().print(table)


def _shown(name: str, value: Any) -> str:
    if value is None:
        return ""
    if name in ("bytes", "peak_bytes"):
        return written(value)
    if name in ("seconds", "tokens_per_s"):
        return f"{value:,.0f}"
    if isinstance(value, float):
        return f"{value:.4g}"
    return str(value).lower() if isinstance(value, bool) else str(value)


def compare(places: list[str], as_json: bool) -> None:
    """Prints what differs between runs: keys of their configurations, then results."""
    runs = [_run(place) for place in places]
    if len(runs) < 2:
        raise InputError("mlxft runs compare takes two runs or more: mlxft runs compare runs/a runs/b")
    every = [run.values() for run in runs]
    keys = [key for key in SCHEMA if key not in _OWN and len({repr(each.get(key)) for each in every}) > 1]
    rows = {key: [each.get(key) for each in every] for key in (*keys, *RESULTS)}
    if as_json:
        print(json.dumps({"runs": places} | rows))
        return
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("")
    for run in runs:
        table.add_column(str(run.folder), justify="right", overflow="fold")
    for key, values in rows.items():
        if key == RESULTS[0]:
            table.add_section()
        table.add_row(key, *(_shown(key, value) for value in values))
    Console().print(table)


def _run(place: str) -> Run:
    run = read(Path(place))
    if run is None:
        raise InputError(f"{place} is not the folder of a run")
    return run


def remove(places: list[str], agreed: bool) -> None:
    """Deletes runs and whole sweeps, after a question. agreed: without it."""
    if not places:
        raise InputError("mlxft runs delete takes the folders of runs: mlxft runs delete runs/x/TIME")
    folders = list(dict.fromkeys(Path(place) for place in places))
    runs = check(folders)
    size = written(sum(run.num_bytes for run in runs))
    if not agreed:
        if not sys.stdin or not sys.stdin.isatty():
            raise InputError(f"{len(runs)} runs, {size}: to delete them without a question, add --yes")
        print("\n".join(f"  {run.folder}  {run.status}  {written(run.num_bytes)}" for run in runs))
        if input(f"delete {len(runs)} runs, {size}? [y/N] ").strip().lower() not in ("y", "yes"):
            print("nothing was deleted")
            return
    for folder in folders:
        delete(folder)
    print(f"deleted {len(runs)} runs, {size}")
