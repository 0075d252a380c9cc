"""The adapters that are in memory, by name: mounted and unmounted while the model answers."""

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any, Optional

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_unflatten

from mlxft.errors import InputError
from mlxft.models.adapter_tensors import LowRank
from mlxft.models.adapters import start_of
from mlxft.models.dora_linear import DoRALinear
from mlxft.models.fitting import Fitted
from mlxft.models.low_rank import wrapped
from mlxft.models.targets import LinearLayer
from mlxft.serving.rows import CurrentRows, RowLinear

RESERVED = ("none", "base", "local", "default", "default_model")


@dataclass
class Resident:
    """A mounted adapter. slot: of its rows. serial: never given twice. users: requests that have it now.
    retired: unmounted since."""

    name: str
    folders: list[str]
    slot: int
    serial: int
    fitted: Fitted
    kind: str
    users: int = 0
    retired: bool = False
    gains: dict[str, mx.array] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        return sum(low.a.nbytes + low.b.nbytes for _, low in self.fitted.updates)

    def described(self) -> dict[str, Any]:
        """Returns what a list of adapters says of it."""
        updates = [low for _, low in self.fitted.updates]
        return {
            "id": self.name,
            "object": "adapter",
            "path": ", ".join(self.folders),
            "kind": self.kind,
            "rank": max(low.rank for low in updates),
            "scale": max((low.scale for low in updates), key=abs),
            "bytes": self.nbytes,
            "layers": len(updates),
        }


class Residents:
    """Adapters on one model. Everything but `get` and `listed` is for the thread that computes.

    check: raises InputError for a folder that must not be mounted.
    """

    def __init__(self, model: nn.Module, current: CurrentRows, check: Callable[[Path], None]):
        self.model, self._current = model, current
        self._check = check
        self._by_slot: dict[int, Resident] = {}
        self._by_name: dict[str, Resident] = {}
        self._originals: dict[str, nn.Module] = {}
        self._serials = count(1)

    def get(self, name: str) -> Optional[Resident]:
        return self._by_name.get(name)

    def listed(self) -> list[Resident]:
        return list(self._by_name.values())

    def mount(self, name: str, folders: list[str], weights: Optional[list[float]] = None) -> Resident:
        """Puts the adapter in a folder into memory under `name`, or the sum of several.

        Raises: InputError for a name that is taken, a folder that is none or is not to be mounted, tensors
        that do not fit, and what cannot differ from row to row.
        """
        if name in self._by_name or name in RESERVED:
            raise InputError(f"there is something called {name} already; choose another name")
        for folder in folders:
            self._check(Path(folder).expanduser())
        self._uninstall()
        try:
            fitted = start_of(self.model, folders, weights)
            _check_linear(fitted)
            slot = next(s for s in range(1, len(self._by_slot) + 2) if s not in self._by_slot)
            resident = Resident(name, list(folders), slot, next(self._serials), fitted, fitted.kind)
            if fitted.kind == "dora":
                resident.gains = {layer.path: _gain(layer, low) for layer, low in fitted.updates}
            self._by_slot[slot] = self._by_name[name] = resident
        finally:
            self._install()
        return resident

    def unmount(self, name: str) -> bool:
        """Takes the name away at once, and the arrays as soon as no request has them; False for no such."""
        resident = self._by_name.pop(name, None)
        if resident is None:
            return False
        resident.retired = True
        self.collect()
        return True

    def collect(self) -> None:
        """Drops adapters that were unmounted and are no longer used."""
        gone = [slot for slot, resident in self._by_slot.items() if resident.retired and not resident.users]
        if gone:
            self._uninstall()
            for slot in gone:
                del self._by_slot[slot]
            self._install()

    def _uninstall(self) -> None:
        """Gives the model the base's own layers back."""
        if self._originals:
            self.model.update_modules(tree_unflatten(list(self._originals.items())))
            self._originals = {}

    def _install(self) -> None:
        layers = {layer.path: layer.module for r in self._by_slot.values() for layer, _ in r.fitted.updates}
        if not layers:
            return
        dtype = _activations(self.model)
        low: dict[int, dict[str, LowRank]] = {
            slot: {layer.path: each for layer, each in resident.fitted.updates}
            for slot, resident in self._by_slot.items()
        }
        slots = range(max(self._by_slot) + 1)
        made = []
        for path, module in layers.items():
            updates = [low.get(slot, {}).get(path) for slot in slots]
            gains = [self._by_slot[s].gains.get(path) if s in self._by_slot else None for s in slots]
            layer = RowLinear(module, updates, gains, self._current)
            layer.cast(dtype)
            made.append((path, layer))
        self.model.update_modules(tree_unflatten(made))
        self._originals = layers


def _check_linear(fitted: Fitted) -> None:
    """Refuses what is not an update of linear layers."""
    others = [layer.path for layer, _ in fitted.updates if layer.is_experts or layer.is_embedding]
    others += fitted.modules
    if others:
        raise InputError(
            f"{fitted.folder} changes {', '.join(others[:3])}, and only updates of linear layers can differ "
            "from request to request. Merge it into a model of its own (mlxft export to=merged) and serve it"
        )


def _gain(layer: LinearLayer, low: LowRank) -> mx.array:
    """Returns what DoRA multiplies each row of the adapted weight by, (out,) float32."""
    module: DoRALinear = wrapped(layer, low, "dora", 0.0, (0, 0))
    gain = module.m / module.lengths(mx.float32)
    mx.eval(gain)
    return gain


def _activations(model: nn.Module) -> mx.Dtype:
    """Returns the type that a model computes in: that of its norms and other vectors."""
    floats = [a for _, a in tree_flatten(model.parameters()) if mx.issubdtype(a.dtype, mx.floating)]
    return next((array.dtype for array in floats if array.ndim == 1), floats[0].dtype)
