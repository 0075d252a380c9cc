"""The flat list of a configuration's keys, and the name a mistyped key was probably meant to be."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, get_origin, get_type_hints

from omegaconf import MISSING

from mlxft.config.aliases import ALIASES
from mlxft.errors import InputError


@dataclass(frozen=True)
class Key:
    """A key by its full name, "optimizer.lr", with its type and default (MISSING: it must be given).

    rule: the name of what its values have to be, where that is not the key's own: one name can mean
    something else to another command.
    """

    name: str
    hint: Any
    default: Any
    rule: str | None = None

    @property
    def takes_keys(self) -> bool:
        """True for a key whose value is a free dictionary, like `data.columns`."""
        return get_origin(self.hint) is dict


def keys_of(*schemas: type) -> dict[str, Key]:
    """Returns every key of the dataclasses, groups flattened: {"optimizer.lr": Key, ...}."""
    found: dict[str, Key] = {}
    for schema in schemas:
        _collect(schema, "", found)
    return found


def _collect(schema: type, prefix: str, found: dict[str, Key]) -> None:
    hints = get_type_hints(schema)
    defaults = schema()
    for item in fields(schema):
        name = prefix + item.name
        if is_dataclass(hints[item.name]):
            _collect(hints[item.name], name + ".", found)
        else:
            rule = item.metadata.get("rule")
            found[name] = Key(name, hints[item.name], getattr(defaults, item.name), rule)


def groups_of(keys: Iterable[str]) -> list[str]:
    """Returns the groups of the keys, in order: "model", "data", ..."""
    return list(dict.fromkeys(name.partition(".")[0] for name in keys if "." in name))


def is_among(name: str, names: Iterable[str]) -> bool:
    """True if the key is one of `names`, or inside of one: "model.path" is inside of "model"."""
    return any(name == other or name.startswith(other + ".") for other in names)


def nest(values: Mapping[Any, Any]) -> dict[str, Any]:
    """Returns `values` with dotted keys taken apart: {"a.b": 1, "a": {"c": 2}} -> {"a": {"b": 1, "c": 2}}.

    Raises: InputError for a key that is given twice, dotted and nested.
    """
    return _nested(list(values.items()), "")


def _nested(items: list[tuple[Any, Any]], above: str) -> dict[str, Any]:
    given: dict[str, list[Any]] = {}
    for name, value in items:
        first, dot, rest = str(name).partition(".")
        given.setdefault(first, []).append({rest: value} if dot else value)
    nested: dict[str, Any] = {}
    for name, values in given.items():
        inner = [value for value in values if isinstance(value, Mapping)]
        plain = [value for value in values if value is not None and not isinstance(value, Mapping)]
        if len(plain) + bool(inner) > 1:
            raise InputError(f"{above}{name}: it is set twice, in a dotted key and in a nested one; keep one")
        if inner:
            nested[name] = _nested([item for each in inner for item in each.items()], f"{above}{name}.")
        else:
            nested[name] = plain[0] if plain else None
    return nested


def flatten(values: Mapping[str, Any], keys: Mapping[str, Key], prefix: str = "") -> dict[str, Any]:
    """Returns nested values by full key name; what is no group of `keys` is left whole as a value.

    A group without anything in it vanishes.
    """
    groups = set(groups_of(keys))
    flat: dict[str, Any] = {}
    for name, value in values.items():
        full = prefix + name
        if full in groups and value is None:
            continue
        unknown_group = isinstance(value, Mapping) and full not in keys and len(value) > 0
        if isinstance(value, Mapping) and (full in groups or unknown_group):
            flat.update(flatten(value, keys, full + "."))
        else:
            flat[full] = value
    return flat


def unknown_key(name: str, keys: Mapping[str, Key]) -> str:
    """Returns the sentence for a key that does not exist: what other tools call it, or the nearest one."""
    if name in groups_of(keys):
        return f"this is a group of keys, not a key: {_listed(name, keys)}"
    if name == "recipe":
        return "this is no key; a recipe is chosen on the command line, with +recipe=NAME"
    leaf = name.rpartition(".")[2]
    for known in (name, leaf):
        meant = ALIASES.get(known.replace("-", "_").lower())
        if meant:
            return f"there is no such key; here it is {meant}"
    near = _nearest_group(name, keys) or nearest_key(name, keys)
    if near is None and edit_distance(name, "recipe") <= 2:
        near = "+recipe=NAME"
    if near:
        return f"there is no such key; did you mean {near}?"
    group = name.partition(".")[0]
    if group in groups_of(keys):
        return f"there is no such key; {_listed(group, keys)}"
    return f"there is no such key; the groups of keys are {', '.join(groups_of(keys))}"


def _nearest_group(name: str, keys: Iterable[str]) -> str | None:
    """Returns the group that a name without a dot is at most two letters from, fewer than any key's is."""
    near = min(groups_of(keys), key=lambda group: edit_distance(name, group))
    edits = edit_distance(name, near)
    nearer = any(edit_distance(name, key) <= edits for key in keys if "." not in key)
    return near if "." not in name and edits <= min(2, len(name) // 2) and not nearer else None


def _listed(group: str, keys: Iterable[str]) -> str:
    inside = [name.partition(".")[2] for name in keys if name.startswith(group + ".")]
    return f"{group} has {', '.join(inside)}"


def nearest_key(name: str, keys: Iterable[str]) -> str | None:
    """Returns the key whose name is fewest edits away, its own group preferred, or None if none is near."""
    group, _, leaf = name.rpartition(".")
    best, best_cost = None, float("inf")
    for candidate in keys:
        other_group, _, other_leaf = candidate.rpartition(".")
        edits = edit_distance(leaf, other_leaf)
        if edits > max(1, min(len(leaf), len(other_leaf)) // 2):
            continue
        apart = edit_distance(group, other_group)
        cost = edits + (apart / 10 if apart <= 2 else 0.5)
        if cost < best_cost:
            best, best_cost = candidate, cost
    return best


def nearest(word: str, known: Iterable[str]) -> str | None:
    """Returns the known word that is fewest edits from `word`, or None if all are more than half away."""
    ranked = sorted((edit_distance(word.lower(), other.lower()), other) for other in known)
    if ranked and ranked[0][0] <= max(1, len(word) // 2):
        return ranked[0][1]
    return None


def edit_distance(a: str, b: str) -> int:
    """Returns how many letters must be inserted, dropped or changed to turn `a` into `b`."""
    row = list(range(len(b) + 1))
    for i, x in enumerate(a, 1):
        before, row = row, [i]
        for j, y in enumerate(b, 1):
            row.append(min(before[j] + 1, row[j - 1] + 1, before[j - 1] + (x != y)))
    return row[-1]


def is_missing(value: Any) -> bool:
    """True for a key that was never given a value, or an empty one."""
    return value is None or value == MISSING or value == "" or value == []
