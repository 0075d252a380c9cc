"""Adapters put to the places that a model has for them; several added up.

    sum of w_i s_i B_i A_i  =  one update: all A_i side by side, all w_i s_i B_i one below the other

That is exact: the ranks add up.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Optional

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from mlxft.config.choices import is_embedding
from mlxft.errors import InputError
from mlxft.models import audit
from mlxft.models.adapter_tensors import Adapter, LowRank, described
from mlxft.models.low_rank import base_of, check_dora, shapes
from mlxft.models.new_rows import BIAS, ROWS, NewRows
from mlxft.models.targets import LinearLayer, adaptable_layers
from mlxft.models.whole_modules import Arrays

# Where other libraries keep a text model's blocks; the number and what follows it are the same.
_BLOCK_PATH = re.compile(r"(?:model|language_model|model\.language_model|language_model\.model)"
                         r"\.layers\.(\d+)\.(.+)")


@dataclass(frozen=True)
class Fitted:
    """An adapter on a model. updates: with the layers they belong to. whole: arrays of modules that are
    trained whole, and new rows, by the model's own names."""

    folder: Path
    kind: str
    updates: list[tuple[LinearLayer, LowRank]]
    whole: Arrays = field(default_factory=dict)

    @property
    def modules(self) -> list[str]:
        """The paths of the modules that are trained whole."""
        return sorted({path for path, _, own in map(_parted, self.whole) if own not in (ROWS, BIAS)})


def _parted(name: str) -> tuple[str, str, str]:
    return name.rpartition(".")


class Places:
    """The modules of a model, found under the names that other libraries give them."""

    def __init__(self, model: nn.Module):
        self.modules = dict(model.named_modules())
        blocks = {id(block): number for number, block in enumerate(model.layers)}
        self._blocks = {blocks[id(m)]: path for path, m in self.modules.items() if id(m) in blocks}
        self.is_tied = not any(_is_head(path) for path in self.modules)

    def find(self, path: str) -> Optional[str]:
        """Returns the model's own path of a module, None if there is none."""
        if path in self.modules:
            return path
        match = _BLOCK_PATH.fullmatch(path)
        if match:
            own = f"{self._blocks.get(int(match[1]))}.{match[2]}"
            return own if own in self.modules else None
        last = path.rpartition(".")[2]
        outside = [p for p in self.modules if p.rpartition(".")[2] == last and not self._is_inside(p)]
        return outside[0] if len(outside) == 1 else None

    def _is_inside(self, path: str) -> bool:
        return any(path.startswith(f"{block}.") for block in self._blocks.values())


def fit(adapter: Adapter, model: nn.Module) -> Fitted:
    """Returns the adapter's updates with the model's layers they belong to, and its whole modules.

    Raises: InputError listing what does not fit, by name.
    """
    places, layers = Places(model), adaptable_layers(model)
    _check_tied(adapter, places)
    check_new_tokens(adapter, model)
    by_path = {layer.path: layer for layer in layers}
    by_path |= {layer.name: layer for layer in layers if layer.block is None}  # in new rows by now
    fitted, unknown, wrong = [], [], []
    for path, low in adapter.layers.items():
        if _is_head(path) and places.is_tied and not adapter.is_tied:
            continue  # the embedding's, as was checked
        layer = by_path.get(places.find(path) or "")
        if layer is None:
            unknown.append(f"{path} (lora_a {tuple(low.a.shape)}, lora_b {tuple(low.b.shape)})")
            continue
        if adapter.kind == "dora":
            check_dora(layer)
        wrong += _wrong_shapes(path, layer, low)
        fitted.append((layer, low))
    present = {layer.path for layer, _ in fitted}
    chosen = adapter.chosen(layers)
    missing = sorted(chosen - present)
    # An embedding with new tokens has its update on the table of those it had.
    tables = {f"{path}.table" for path in adapter.layers}
    named = chosen | {layer.path for layer in layers if layer.path in tables}
    unnamed = sorted(present - named) if adapter.chosen_are_all else []
    whole, odd = _whole(adapter, places)
    refuse(adapter.folder, {"no such linear layer in the model": unknown, "wrong shape": wrong,
                            "not in the model, or in another shape": odd,
                            "missing in the adapter, though its configuration names them": missing,
                            "in the adapter, though its configuration does not name them": unnamed})
    _check_embeddings(adapter, places)
    if not fitted:
        raise InputError(f"the adapter in {adapter.folder} holds no tensors")
    return Fitted(adapter.folder, adapter.kind, fitted, whole)


def check_new_tokens(adapter: Adapter, model: nn.Module) -> None:
    """Raises InputError if the model lacks new tokens of the adapter, or has some that its tables lack.

    Of an adapter that does not say which it has only shapes are looked at, later.
    """
    if adapter.num_new_tokens is None:
        return
    tables = {path: module for path, module in model.named_modules() if isinstance(module, NewRows)}
    count = max((module.new_rows.shape[0] for module in tables.values()), default=0)
    if adapter.num_new_tokens > count:
        raise InputError(
            f"the adapter in {adapter.folder} brings {adapter.num_new_tokens} new tokens, and the model was "
            "given none of them. Merge it into a model (mlxft export ... to=merged) and take that"
        )
    lacking = [
        path for path in tables if not {f"{path}.{ROWS}", f"{path}.weight"} & adapter.weights.keys()
    ]
    if adapter.num_new_tokens and lacking:
        raise InputError(
            f"the adapter in {adapter.folder} has no rows of its new tokens for {', '.join(lacking)}. It was "
            "trained on another model: give that one as model.path"
        )
    whole = [path for path, _, own in map(_parted, adapter.weights) if path in tables and own == "weight"]
    if whole and adapter.num_new_tokens < count:
        raise InputError(
            f"the adapter in {adapter.folder} holds all of {whole[0]}, without rows for the new tokens. They "
            "can be added to adapters that train few rows, not to whole tables: leave model.new_tokens out"
        )


def _wrong_shapes(path: str, layer: LinearLayer, low: LowRank) -> list[str]:
    """Returns a line for each of the update's arrays that the layer has no use for in its shape."""
    found, wanted = _sizes(low.a.shape, low.b.shape), _sizes(*shapes(layer, low.rank))
    wrong = [] if found == wanted else [f"{path} {found} instead of {wanted}"]
    outputs = shapes(layer, low.rank)[1][1]
    if low.m is not None and low.m.shape != (outputs,):
        wrong.append(f"{path} {tuple(low.m.shape)} lengths of rows instead of {outputs}")
    return wrong


def _sizes(a: tuple[int, ...], b: tuple[int, ...]) -> str:
    return f"{a[0]} to {b[1]}" if len(a) == len(b) == 2 else f"{tuple(a)} and {tuple(b)}"


def _whole(adapter: Adapter, places: Places) -> tuple[Arrays, list[str]]:
    """Returns the arrays of whole modules by the model's names, and a line for each that has no place."""
    whole, odd = {}, []
    for name, array in adapter.weights.items():
        path, _, own = name.rpartition(".")
        if _is_head(path) and places.is_tied and not adapter.is_tied:
            continue  # the embedding's, as was checked
        place = places.find(path)
        module = places.modules.get(place or "")
        fits = True
        if isinstance(module, NewRows) and own in module.own():
            fits = array.ndim > 0 and array.shape[0] == adapter.num_new_tokens
            array = module.completed(own, array) if fits else array
        shape = None if module is None else _dense_shape(module, own)
        if fits and shape == tuple(array.shape):
            whole[f"{place}.{own}"] = array
        else:
            odd.append(described(name, array))
    return whole, odd


def _dense_shape(module: nn.Module, name: str) -> Optional[tuple[int, ...]]:
    """Returns the shape of a module's array, of packed ones what they stand for; None if it has none."""
    if isinstance(module, NewRows) and name not in module:
        shape = _dense_shape(module.table, name)
        return shape and (module.size, *shape[1:])
    if not isinstance(module.get(name), mx.array):
        return None
    shape = tuple(module[name].shape)
    if name == "weight" and "scales" in module:
        return (*shape[:-1], shape[-1] * 32 // module.bits)
    return shape


def _check_tied(adapter: Adapter, places: Places) -> None:
    """Refuses what leaves the head of a tied model as it was while its embedding changes, or the reverse."""
    if adapter.is_tied or not places.is_tied:
        return
    on_heads = [low for path, low in adapter.layers.items() if _is_head(path)]
    on_embeddings = [low for path, low in adapter.layers.items() if is_embedding(path)]
    adapted = len(on_heads) != len(on_embeddings) or not all(map(_one_update, on_heads, on_embeddings))
    weights = {name.rpartition(".")[0]: array for name, array in adapter.weights.items()}
    heads = [array for path, array in weights.items() if _is_head(path)]
    embeddings = [array for path, array in weights.items() if is_embedding(path)]
    same = len(heads) == len(embeddings) and all(
        one.shape == other.shape and mx.array_equal(one, other).item()
        for one, other in zip(heads, embeddings, strict=True)
    )
    if adapted or not same:
        raise InputError(
            f"the adapter in {adapter.folder} changes the embedding and leaves the head as it was, or the "
            "other way round; in the model the two are one. Merge it into a model with a head of its own"
        )


def _one_update(head: LowRank, embedding: LowRank) -> bool:
    """Tells whether the two change one matrix (V, H), which the embedding has the other way round."""
    pairs = ((head.a.T, embedding.b), (head.b.T, embedding.a))
    same = all(one.shape == other.shape and mx.array_equal(one, other).item() for one, other in pairs)
    return same and head.scale == embedding.scale


def _is_head(path: str) -> bool:
    return path.rpartition(".")[2] == "lm_head"


def _check_embeddings(adapter: Adapter, places: Places) -> None:
    """Raises InputError if the adapter was trained on another embedding than the model's."""
    for path, array in adapter.embeddings.items():
        module = base_of(places.modules[places.find(path)]) if places.find(path) else None
        own = None if module is None or "scales" in module else module.get("weight")
        if own is None:
            continue
        near = own.shape == array.shape and mx.allclose(own, array.astype(own.dtype), rtol=2e-2, atol=1e-3)
        if not near:
            raise InputError(f"the adapter in {adapter.folder} was trained on another embedding than the "
                             f"model has: {path} {tuple(array.shape)} instead of {tuple(own.shape)}, or with "
                             "other values")


def added_up(all_fitted: Sequence[Fitted], weights: Sequence[float], model: nn.Module) -> Fitted:
    """Returns the sum of the adapters, each times its weight.

    Of modules that are whole what is added up is their difference to the base. Raises: InputError for
    adapters that are not LoRA.
    """
    for fitted in all_fitted:
        if fitted.kind != "lora":
            raise InputError(f"{fitted.folder} is of kind {fitted.kind}; only LoRA adapters can be added up")
    layers = {layer.path: layer for fitted in all_fitted for layer, _ in fitted.updates}
    parts: dict[str, list[tuple[float, LowRank]]] = {path: [] for path in layers}
    whole: Arrays = {}
    base = {path: array for path, array in tree_flatten(model.parameters())}
    for fitted, weight in zip(all_fitted, weights, strict=True):
        for layer, low in fitted.updates:
            parts[layer.path].append((weight, low))
        for name, array in fitted.whole.items():
            own = _own_array(model, name, base).astype(mx.float32)
            whole[name] = whole.get(name, own) + weight * (array.astype(mx.float32) - own)
    updates = [(layers[path], _side_by_side(each)) for path, each in parts.items()]
    return Fitted(all_fitted[0].folder, "lora", updates, whole)


def _own_array(model: nn.Module, name: str, base: Arrays) -> mx.array:
    path, _, own = name.rpartition(".")
    module = dict(model.named_modules())[path]
    is_table = isinstance(module, NewRows) and own not in module
    if own == "weight" and "scales" in (module.table if is_table else module):
        raise InputError(f"{name} is quantised in the model, so whole modules of it cannot be added up")
    return module.in_one(own) if is_table else base[name]


def _side_by_side(parts: list[tuple[float, LowRank]]) -> LowRank:
    scale = max(abs(weight * low.scale) for weight, low in parts)
    axis = 0 if parts[0][1].b.ndim == 2 else 2
    a = [low.a.astype(mx.float32) for _, low in parts]
    b = [low.b.astype(mx.float32) * (weight * low.scale / scale) for weight, low in parts]
    return LowRank(mx.concatenate(a, axis=1), mx.concatenate(b, axis=axis), scale)


def refuse(folder: Path, problems: dict[str, list[str]]) -> None:
    """Raises InputError listing what does not fit, if anything does not."""
    lines = [f"{len(names)} x {what}: {audit.listed(names)}" for what, names in problems.items() if names]
    if lines:
        raise InputError(f"the adapter in {folder} does not fit the model:\n  " + "\n  ".join(lines))
