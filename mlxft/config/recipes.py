"""Recipes: whole runs as YAML files, those that come with mlxft and those in the user's ./recipes."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from mlxft.config.keys import nearest, nest
from mlxft.errors import InputError
from mlxft.resources import folder

USERS_FOLDER = Path("recipes")


@dataclass(frozen=True)
class Recipe:
    """A recipe's file, found but not read."""

    name: str
    path: Path

    @property
    def shown_path(self) -> str:
        """The path as a person would type it: relative where it is below the current folder."""
        path = self.path.absolute()
        return str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)


@dataclass(frozen=True)
class RecipeBody:
    """A recipe's keys, nested, and the line each stands in ("recipes/x.yaml:7"), by full name."""

    values: dict[str, Any]
    lines: dict[str, str]


def find_recipes() -> dict[str, Recipe]:
    """Returns every recipe by name; one in ./recipes wins over mlxft's own of the same name."""
    found: dict[str, Recipe] = {}
    for place in (folder("recipes"), USERS_FOLDER):
        for path in sorted(place.glob("*.yaml")) + sorted(place.glob("*.yml")):
            if path.is_file():
                found[path.stem] = Recipe(path.stem, path)
    return dict(sorted(found.items()))


def find_recipe(name: str) -> Recipe:
    """Returns the recipe called `name`.

    Raises: InputError that lists what there is, the nearest name first.
    """
    recipes = find_recipes()
    if name in recipes:
        return recipes[name]
    raise InputError(f"recipe {unknown_recipe(name, recipes)}")


def unknown_recipe(name: str, recipes: dict[str, Recipe]) -> str:
    """Returns the sentence for a recipe that does not exist."""
    near = nearest(Path(name).stem, recipes)
    hint = f"did you mean {near}? " if near else ""
    there = ", ".join(recipes) if recipes else "none"
    return f"{name!r} does not exist; {hint}there is {there} (mlxft recipes says what each does)"


def description(recipe: Recipe) -> str:
    """Returns the comment a recipe begins with, as one line."""
    words = []
    for line in recipe.path.read_text(encoding="utf-8", errors="replace").splitlines():
        if not line.startswith("#"):
            if words or line.strip():
                break
            continue
        words.append(line.lstrip("#").strip())
    return " ".join(word for word in words if word and not word.startswith("@package"))


def read_recipe(recipe: Recipe) -> RecipeBody:
    """Returns what a recipe sets.

    Raises: InputError with file and line where it is not YAML, or not a dictionary of keys.
    """
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    where = recipe.shown_path
    try:
        text = recipe.path.read_text(encoding="utf-8")
        tree = yaml.compose(text, Loader=yaml.SafeLoader)
        if tree is None:
            return RecipeBody({}, {})
        if not isinstance(tree, yaml.MappingNode):
            raise InputError(f"{where}:1: a recipe is a dictionary: 'model: {{path: ...}}'")
        lines = _lines(tree, where)
        _check_interpolations(tree, where)
        values = OmegaConf.to_container(OmegaConf.load(recipe.path), resolve=False)
    except yaml.YAMLError as error:
        raise InputError(_yaml_message(error, where)) from None
    except RecursionError:
        raise InputError(f"{where}: an anchor (&name) contains itself") from None
    except UnicodeDecodeError as error:
        raise InputError(f"{where}: this is not text in UTF-8 ({error.reason})") from None
    except OSError as error:
        raise InputError(f"{where}: it can't be read ({error.strerror})") from None
    except OmegaConfBaseException as error:
        raise InputError(f"{where}: {_first_line(error)}") from None
    return RecipeBody(nest(values), lines)


def _yaml_message(error: yaml.YAMLError, where: str) -> str:
    mark = getattr(error, "problem_mark", None)
    problem = getattr(error, "problem", None) or _first_line(error)
    context = getattr(error, "context", None)
    line = f":{mark.line + 1}" if mark else ""
    return f"{where}{line}: this is not YAML: {problem}" + (f" ({context})" if context else "")


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]


def _lines(tree: yaml.MappingNode, where: str) -> dict[str, str]:
    """Returns the line of each key by its full name. Raises: InputError for one that is set twice."""
    found: dict[str, str] = {}
    plain: set[str] = set()
    for name, line, is_group in _keys_of(tree):
        here = f"{where}:{line}"
        if name in found and (name in plain or not is_group):
            first = found[name].rpartition(":")[2]
            raise InputError(f"{here}: {name} is set here and in line {first}; keep one of them")
        found.setdefault(name, here)
        if not is_group:
            plain.add(name)
    return found


def _keys_of(tree: yaml.MappingNode, prefix: str = "") -> Iterator[tuple[str, int, bool]]:
    """Yields (full name, line from 1, whether more keys are below it) of every key, dotted or nested."""
    for name, value in tree.value:
        full, line = prefix + str(name.value), name.start_mark.line + 1
        groups = full.removeprefix(prefix).split(".")[:-1]
        yield from ((prefix + ".".join(groups[: n + 1]), line, True) for n in range(len(groups)))
        is_empty = isinstance(value, yaml.ScalarNode) and value.tag == "tag:yaml.org,2002:null"
        yield full, line, is_empty or isinstance(value, yaml.MappingNode)
        if isinstance(value, yaml.MappingNode):
            yield from _keys_of(value, full + ".")


def _check_interpolations(tree: yaml.Node, where: str) -> None:
    from omegaconf import OmegaConf
    from omegaconf.errors import GrammarParseError

    if isinstance(tree, yaml.ScalarNode) and "${" in tree.value:
        try:
            OmegaConf.create({"value": tree.value})
        except GrammarParseError as error:
            where = f"{where}:{tree.start_mark.line + 1}"
            reason = re.sub(r"^.*?error: ", "", _first_line(error))
            raise InputError(f"{where}: {tree.value!r} is not an interpolation ({reason})") from None
    elif isinstance(tree, yaml.SequenceNode):
        for item in tree.value:
            _check_interpolations(item, where)
    elif isinstance(tree, yaml.MappingNode):
        for _, value in tree.value:
            _check_interpolations(value, where)
