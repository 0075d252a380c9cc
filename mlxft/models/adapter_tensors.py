"""An adapter read from a folder, whatever layout it had there."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Callable

import mlx.core as mx

from mlxft.errors import InputError
from mlxft.models import audit
from mlxft.models.targets import LinearLayer


@dataclass(frozen=True)
class LowRank:
    """One layer's update: a (in, r), b (r, out), y = W x + scale * B A x."""

    a: mx.array
    b: mx.array
    scale: float

    @property
    def rank(self) -> int:
        return self.a.shape[1]


@dataclass(frozen=True)
class Adapter:
    """What a folder holds: low-rank updates by module path, or whole weights by name.

    chosen: given a model's linear layers, the paths that the folder's own configuration says are
    adapted (to find what is missing).
    """

    folder: Path
    kind: str  # lora | full
    layers: dict[str, LowRank] = field(default_factory=dict)
    weights: dict[str, mx.array] = field(default_factory=dict)
    chosen: Callable[[list[LinearLayer]], set[str]] = lambda layers: set()


def read_tensors(file: Path) -> dict[str, mx.array]:
    """Returns the tensors of a safetensors file. Raises: InputError if it is damaged."""
    audit.tensor_names(file)
    try:
        tensors = mx.load(str(file))
        mx.eval(tensors)
    except (RuntimeError, ValueError) as error:
        raise InputError(f"{file} cannot be read: {error}") from error
    return tensors


def paired(tensors: dict[str, mx.array], suffixes: tuple[str, str],
           file: Path) -> dict[str, tuple[mx.array, mx.array]]:
    """Returns (A, B) by module path for tensors named path + one of the two `suffixes`.

    Raises: InputError listing tensors with other names, or those that lack their other half.
    """
    halves: dict[str, dict[str, mx.array]] = {}
    unknown = []
    for name, tensor in sorted(tensors.items()):
        suffix = next((s for s in suffixes if name.endswith(s)), None)
        if suffix is None:
            unknown.append(described(name, tensor))
        else:
            halves.setdefault(name.removesuffix(suffix), {})[suffix] = tensor
    if unknown:
        raise InputError(f"{file}: not the tensors of a linear layer's LoRA: {audit.listed(unknown)}")
    missing = [path + s for path, found in halves.items() for s in suffixes if s not in found]
    if missing:
        raise InputError(f"{file}: missing tensors: {audit.listed(missing)}")
    flat = [described(path + s, half) for path, found in halves.items() for s, half in found.items()
            if half.ndim != 2]
    if flat:
        raise InputError(f"{file}: not matrices, so not the LoRA of linear layers: {audit.listed(flat)}")
    return {path: (found[suffixes[0]], found[suffixes[1]]) for path, found in halves.items()}


def described(name: str, tensor: mx.array) -> str:
    """Returns a tensor as it stands in a message: its name and its shape."""
    return f"{name} {tuple(tensor.shape)}"


def number(config: dict, key: str, file: Path) -> float:
    """Returns the number config[key]. Raises: InputError naming file and key."""
    value = config.get(key)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise InputError(f"{file}: {key} is {value!r}, expected a number")
    return value
