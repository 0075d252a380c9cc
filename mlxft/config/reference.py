"""The list of keys that --help prints, taken from the schema's own lines and comments."""

import inspect
import re
from typing import get_type_hints

from omegaconf import MISSING

from mlxft.config.keys import Key, groups_of, is_among, keys_of
from mlxft.config.schema import (
    ChatConfig,
    Config,
    EvalKeys,
    ExportConfig,
    GenerateConfig,
    PreviewKeys,
    QuantizeConfig,
    ServerKeys,
    SweepKeys,
)

_FIELD = re.compile(r"^    (?P<name>\w+): .*?(?:  # (?P<comment>.*))?$", re.MULTILINE)


def training_keys(used: tuple[str, ...] | None = None) -> str:
    """Returns a line for each key among the groups and keys `used` (None: all): name, default, what it is."""
    return _in_groups(Config, used)


def evaluation_keys() -> str:
    """Returns a line for each key that only `mlxft eval` has."""
    return _in_groups(EvalKeys, None)


def preview_keys() -> str:
    """Returns a line for each key that only `mlxft preview` has."""
    return _in_groups(PreviewKeys, None)


def server_keys() -> str:
    """Returns a line for each key that only `mlxft serve` has."""
    return _in_groups(ServerKeys, None)


def sweep_keys() -> str:
    """Returns a line for each key that only `mlxft train -m` has."""
    return _in_groups(SweepKeys, None)


def _in_groups(schema_of_groups: type, used: tuple[str, ...] | None) -> str:
    keys = keys_of(schema_of_groups)
    keys = {name: key for name, key in keys.items() if used is None or is_among(name, used)}
    comments: dict[str, str] = {}
    for group, schema in get_type_hints(schema_of_groups).items():
        comments |= {f"{group}.{name}": text for name, text in _comments(schema).items()}
    return "\n\n".join(
        "\n".join(_line(key, comments) for name, key in keys.items() if name.startswith(group + "."))
        for group in groups_of(keys)
    )


def generation_keys() -> str:
    """Returns a line for each key that only `mlxft generate` has."""
    return _of(GenerateConfig)


def quantization_keys() -> str:
    """Returns a line for each key that only `mlxft quantize` has."""
    return _of(QuantizeConfig)


def export_keys() -> str:
    """Returns a line for each key that only `mlxft export` has."""
    return _of(ExportConfig)


def chat_keys() -> str:
    """Returns a line for each key that only `mlxft chat` has."""
    return _of(ChatConfig)


def _of(schema: type) -> str:
    comments = _comments(schema)
    return "\n".join(_line(key, comments) for key in keys_of(schema).values())


def _comments(schema: type) -> dict[str, str]:
    """Returns what the schema says of each key, in the words of YAML."""
    found = {field["name"]: field["comment"] or "" for field in _FIELD.finditer(inspect.getsource(schema))}
    return {name: comment.replace("None", "null") for name, comment in found.items()}


def _line(key: Key, comments: dict[str, str]) -> str:
    default = key.default
    if default is None or default == MISSING:
        shown = key.name
    else:
        shown = f"{key.name}={str(default).lower() if isinstance(default, bool) else default}"
    return f"  {shown.replace(' ', ''):<33} {comments[key.name]}".rstrip()
