"""Which keys vary, in Hydra's grammar: a=1,2 and choice(1,2), range(1,4), for a search also interval(0,1)."""

import itertools
import re
from dataclasses import dataclass, field

from mlxft.errors import InputError

_ARGUMENT = re.compile(r"(?P<plus>\+{0,2})(?P<name>[\w.-]+)=(?P<value>.+)", re.DOTALL)
# Keys whose value without brackets is a list in a single run too: several lists are [a],[a,b].
_LISTS = ("adapter.targets",)
_UNFIT = re.compile(r"[^\w.+-]+")
_MOST_CHARACTERS = 80  # of a job's name; file systems allow 255


@dataclass(frozen=True)
class Axis:
    """A key that varies. sweep: Hydra's reading of its values."""

    name: str
    plus: str
    sweep: object

    def assignments(self) -> list[str]:
        """Returns an argument for each of its values. Raises: InputError for an interval: it has no end."""
        if self.sweep.is_interval_sweep():
            raise InputError(
                f"{self.name}: interval() has no list of values; give some, or let sweep.search=optuna choose"
            )
        return [f"{self.plus}{self.name}={value}" for value in self.sweep.sweep_string_iterator()]


@dataclass(frozen=True)
class Job:
    """One run of a sweep. arguments: what `mlxft train` takes. varied: its values of the keys that vary."""

    number: int
    arguments: tuple[str, ...]
    varied: dict[str, str] = field(default_factory=dict)

    @property
    def shown(self) -> dict[str, str]:
        """Its values as a person reads them: numbers with four digits."""
        return {key: _short(value) for key, value in self.varied.items()}

    @property
    def name(self) -> str:
        """What its folder is called: its number and what is special about it."""
        shown = {key: value.rpartition("/")[2] or value for key, value in self.shown.items()}
        parts = [f"{key.rpartition('.')[2]}={value}" for key, value in shown.items()]
        told = "_".join(_UNFIT.sub("-", part.replace("=", "-", 1)).strip("-") for part in parts)
        return f"{self.number:02d}_{told}"[:_MOST_CHARACTERS].rstrip("_-.")

    def __str__(self) -> str:
        return " ".join(f"{key}={value}" for key, value in self.varied.items())


def _short(value: str) -> str:
    try:
        return f"{float(value):.4g}" if "." in value or "e" in value else value
    except ValueError:
        return value


def take_apart(arguments: list[str]) -> tuple[list[str], list[Axis]]:
    """Returns the arguments that all jobs share, and the keys that vary; a key given twice counts last."""
    axes: dict[str, Axis] = {}
    shared: dict[str, str] = {}
    for argument in arguments:
        match = _ARGUMENT.fullmatch(argument.strip())
        name = match["name"] if match else argument
        sweep = _sweep(match["name"], match["value"]) if match else None
        axes.pop(name, None)
        shared.pop(name, None)
        if sweep is None:
            shared[name] = argument
        else:
            axes[name] = Axis(name, match["plus"], sweep)
    return list(shared.values()), list(axes.values())


def _sweep(name: str, value: str) -> object | None:
    """Returns Hydra's reading of a value that is several, None for one that is not, or can't be read."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    if name in _LISTS and not value.startswith(("[", "choice(")):
        return None
    try:
        parsed = OverridesParser.create().parse_override(f"++{name}={value}")
    except HydraException:
        return None  # the run's own check tells what is wrong with it
    return parsed if parsed.is_sweep_override() else None


def product(shared: list[str], axes: list[Axis]) -> list[Job]:
    """Returns a job for each combination of the axes' values, the last axis varying fastest."""
    names = [axis.name for axis in axes]
    jobs = []
    for number, chosen in enumerate(itertools.product(*(axis.assignments() for axis in axes))):
        values = [assignment.partition("=")[2] for assignment in chosen]
        jobs.append(Job(number, (*shared, *chosen), dict(zip(names, values, strict=True))))
    return jobs
