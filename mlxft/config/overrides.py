"""What was typed after the command: KEY=VALUE, GROUP=FILE and +recipe=NAME, read and checked one by one."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

import yaml

from mlxft.config.aliases import ALIASES
from mlxft.config.keys import Key, nearest, nearest_key, unknown_key
from mlxft.config.problems import Problems
from mlxft.config.recipes import find_recipes, unknown_recipe
from mlxft.resources import folder

_ARGUMENT = re.compile(r"(?:\+\+|\+)?(?P<name>[^=]*?)\s*=(?P<value>.*)", re.DOTALL)

# Keys that hold free text or a pattern: taken as typed, being full of what Hydra's grammar reserves.
_SWEEP = "sweep"  # a group of keys that only mlxft train -m has

FREE_TEXT = ("prompt", "system", "eval.extract")


@dataclass
class Request:
    """A command's arguments, sorted.

    recipe: its name. choices: the files chosen of each group. assignments: KEY=VALUE as Hydra reads
    it. texts: free text by key.
    """

    recipe: str | None = None
    choices: dict[str, list[str]] = field(default_factory=dict)
    assignments: list[str] = field(default_factory=list)
    texts: dict[str, str] = field(default_factory=dict)

    def as_hydra_overrides(self) -> list[str]:
        """Returns the arguments for Hydra's compose; what comes later wins over what is chosen by file."""
        chosen = [f"{group}=[{','.join(names)}]" for group, names in self.choices.items()]
        recipe = [f"recipe={self.recipe}"] if self.recipe else []
        return recipe + chosen + self.assignments


def group_files() -> dict[str, dict[str, Path]]:
    """Returns the files of each group in configs/: {"trainer": {"sft": path, ...}, ...}."""
    found: dict[str, dict[str, Path]] = {}
    for path in sorted(folder("configs").glob("*/*.yaml")):
        found.setdefault(path.parent.name, {})[path.stem] = path
    return found


def read_overrides(arguments: list[str], keys: Mapping[str, Key], problems: Problems) -> Request:
    """Returns the arguments sorted; whatever is wrong with one is added to `problems` and left out."""
    request = Request()
    groups = group_files()
    for argument in arguments:
        if any("\ud800" <= character <= "\udfff" for character in argument):
            shown = argument.encode("utf-8", "backslashreplace").decode()
            problems.add(shown, "this is not text in UTF-8; set the terminal to UTF-8")
            continue
        match = _ARGUMENT.fullmatch(argument.lstrip())
        if argument.startswith(("-", "~")) or not match:
            problems.add(argument, _not_an_assignment(argument, keys))
            continue
        name, value = match["name"].strip(), match["value"].strip()
        if name.partition(".")[0] == _SWEEP and not any(key.startswith(f"{_SWEEP}.") for key in keys):
            problems.add(name, "sweeps are run with -m: mlxft train -m +sweep=lr_grid ...")
            continue
        if name == "recipe":
            _read_recipe(value, request, problems)
        elif name in FREE_TEXT and name in keys:
            request.texts[name] = _unquoted(match["value"])
        elif name in groups:
            _read_choice(name, value, groups[name], request, problems)
        elif name in keys or _is_inside(name, keys):
            _read_assignment(name, value, keys, request, problems)
        else:
            problems.add(name, unknown_key(name, keys))
    _check_axes(request, groups, problems)
    return request


def _not_an_assignment(argument: str, keys: Mapping[str, Key]) -> str:
    if argument.startswith("-"):
        name = argument.lstrip("-").partition("=")[0].replace("-", "_")
        if name in ("m", "multirun"):
            return "several runs at once are for training: mlxft train -m KEY=VALUE,VALUE"
        ours = name if name in keys else ALIASES.get(name) or nearest_key(name, keys)
        return "this is no option; settings are written KEY=VALUE" + (f": {ours}=..." if ours else "")
    if argument.startswith("~"):
        return "keys can't be removed; give a value, or leave the argument out"
    name = Path(argument).stem
    if name in find_recipes():
        return f"this is not KEY=VALUE; for the recipe write +recipe={name}"
    if argument.endswith((".yaml", ".yml")):
        return f"this is not KEY=VALUE; a file of settings in ./recipes is chosen with +recipe={name}"
    return "this is not KEY=VALUE"


def _unquoted(text: str) -> str:
    return text[1:-1] if len(text) > 1 and text[0] == text[-1] and text[0] in "\"'" else text


def _is_inside(name: str, keys: Mapping[str, Key]) -> bool:
    above = name.rpartition(".")[0]
    return above in keys and keys[above].takes_keys


def _read_recipe(value: str, request: Request, problems: Problems) -> None:
    name = _unquoted(value).removesuffix(".yaml")
    recipes = find_recipes()
    if request.recipe not in (None, name):
        problems.add("recipe", f"one run has one recipe, not {request.recipe} and {name}")
    elif name not in recipes:
        problems.add("recipe", unknown_recipe(name, recipes))
    else:
        request.recipe = name


def _read_choice(
    group: str, value: str, files: Mapping[str, Path], request: Request, problems: Problems
) -> None:
    if group == "model" and value not in files and ("/" in value or Path(value).is_dir()):
        request.assignments.append(f"++model.path={_quoted(_unquoted(value))}")
        return
    names = [name.strip() for name in value.strip("[]").split(",")]
    for name in names:
        if name in files:
            request.choices.setdefault(group, []).append(name)
            continue
        near = nearest(name, files)
        hint = f"did you mean {near}? " if near else ""
        there = f"there is {', '.join(files)}; its keys are set as {group}.KEY=VALUE"
        problems.add(group, f"{name!r} is no file of configs/{group}; {hint}{there}")


def _check_axes(request: Request, groups: Mapping[str, Mapping[str, Path]], problems: Problems) -> None:
    for group, names in request.choices.items():
        owner: dict[str, str] = {}
        for name in dict.fromkeys(names):
            for key in yaml.safe_load(groups[group][name].read_text(encoding="utf-8")) or {}:
                if key in owner:
                    problems.add(group, f"{owner[key]} and {name} both set {group}.{key}; choose one")
                owner[key] = name
        request.choices[group] = list(dict.fromkeys(names))


def _read_assignment(
    name: str, value: str, keys: Mapping[str, Key], request: Request, problems: Problems
) -> None:
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    if not value:
        problems.add(name, "the value after = is missing; for none write null")
        return
    if name == "adapter.targets" and value != "null" and not value.startswith(("[", '"', "'")):
        value = f"[{value}]"
    try:
        parsed = OverridesParser.create().parse_override(f"++{name}={value}")
    except HydraException as error:
        problems.add(name, _syntax_message(name, value, error))
        return
    if parsed.is_sweep_override():
        lists = name in keys and isinstance(keys[name].default, list) or name in ("data.train", "data.valid")
        meant = f"for a list write {name}=[{value}]" if lists else "give one, or run each: mlxft train -m"
        problems.add(name, f"{value} means several values; {meant}")
        return
    if name in keys and _is_text(keys[name]) and _is_number(parsed.value()):
        value = _quoted(value)  # a revision of digits is a name, not a number
    request.assignments.append(f"++{name}={value}")


def _syntax_message(name: str, value: str, error: Exception) -> str:
    if "${" in value:
        return f"{value} is not an interpolation; one is written ${{trainer.max_steps}}"
    reason = str(error).strip().partition("\n")[0]
    return f"{value} can't be read ({reason}); put it in quotes: '{name}={_quoted(_unquoted(value))}'"


def _quoted(text: str) -> str:
    escaped = re.sub(r'(\\*)"', r'\1\1\\"', text)
    trailing = len(escaped) - len(escaped.rstrip("\\"))
    return f'"{escaped}{escaped[len(escaped) - trailing :]}"'


def _is_text(key: Key) -> bool:
    if key.takes_keys:
        return False
    return key.hint is str or str in get_args(key.hint) or key.name in ("data.train", "data.valid")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
