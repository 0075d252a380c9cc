"""Modules that are trained whole beside low-rank updates: norms, embeddings, heads.

A module keeps its place and its names; the base's arrays are kept on it for when the adapter is off. What is
quantised is made dense first. An embedding that is the head too is one module, and both uses train it.
"""

from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_unflatten

from mlxft.errors import InputError
from mlxft.models.dequantise import dense, is_quantised
from mlxft.models.lora_linear import AdaptedLayer, KeptBase
from mlxft.models.new_rows import NewRows, make_one

Arrays = dict[str, mx.array]


def select_modules(model: nn.Module, names: Iterable[str]) -> list[str]:
    """Returns the paths of the modules that the names or patterns (fnmatch) choose, in the model's order.

    A name is a module's last one ("norm") or its whole path. Raises: InputError for one that matches nothing.
    """
    paths = [path for path, module in model.named_modules() if path and tree_flatten(module.parameters())]
    chosen: set[str] = set()
    for name in names:
        matching = {path for path in paths if fnmatchcase(path, name) or fnmatchcase(_last(path), name)}
        if not matching:
            raise InputError(f"adapter.modules_to_save: {_unmatched(name, paths)}")
        chosen |= matching
    inner = {path for path in chosen if any(path.startswith(f"{other}.") for other in chosen)}
    return [path for path in paths if path in chosen - inner]


def _unmatched(name: str, paths: list[str]) -> str:
    if _last(name) == "lm_head":
        return f"the model has no {name}: its embedding is its head too. Name that: embed_tokens"
    there = sorted({_last(path) for path in paths if not _last(path).isdecimal()})
    return f"{name!r} matches no module. There are: {', '.join(there)}"


def leaves(model: nn.Module, paths: Iterable[str]) -> list[str]:
    """Returns the paths of the modules inside of those at `paths`, they among them, that have arrays.

    A table and its new rows are one module: that is what they become when they are trained whole.
    """
    modules = dict(model.named_modules())
    return sorted(
        path
        for path, module in modules.items()
        if any(f"{path}.".startswith(f"{whole}.") for whole in paths)
        and any(_is_parameter(module, name) for name in module)
        and not isinstance(modules.get(path.rpartition(".")[0]), NewRows)
    )


def train_whole(model: nn.Module, paths: Iterable[str]) -> None:
    """Makes all arrays of the modules trainable, in place. Raises: InputError for one with updates inside."""
    modules, paths = dict(model.named_modules()), list(paths)
    for path in paths:
        adapted = [
            other
            for other, module in modules.items()
            if isinstance(module, AdaptedLayer) and f"{other}.".startswith(f"{path}.")
        ]
        if adapted:
            raise InputError(
                f"adapter.modules_to_save: {path} has a low-rank update too, at {adapted[0]}. A module is "
                "trained one way or the other: name it in adapter.targets or here"
            )
        _make_dense(model, path, modules[path])
    modules = dict(model.named_modules())
    for path in paths:
        modules[path].unfreeze()
        for module in modules[path].modules():
            arrays = {name: module[name] for name in module if _is_parameter(module, name)}
            module.kept_base = KeptBase(arrays)


def whole_paths(model: nn.Module) -> list[str]:
    """Returns the paths of the modules that have arrays and are trained whole."""
    return sorted(
        path for path, module in model.named_modules() if _kept(module) and not isinstance(module, NewRows)
    )


def whole_arrays(model: nn.Module) -> Arrays:
    """Returns the arrays of the modules that are trained whole and new rows, by name, as they are now."""
    return {
        f"{path}.{name}": module[name]
        for path, module in model.named_modules()
        for name in sorted(_kept(module))
    }


def base_arrays(model: nn.Module) -> Arrays:
    """Returns what `whole_arrays` had before training."""
    return {
        f"{path}.{name}": array
        for path, module in model.named_modules()
        for name, array in _kept(module).items()
    }


def set_arrays(model: nn.Module, arrays: Mapping[str, mx.array]) -> None:
    """Replaces arrays by name, in the types that the model has them in."""
    own = dict(tree_flatten(model.parameters()))
    model.update(tree_unflatten([(name, array.astype(own[name].dtype)) for name, array in arrays.items()]))


def _kept(module: nn.Module) -> Arrays:
    kept = getattr(module, "kept_base", None)
    return {} if kept is None else kept.arrays


def _is_parameter(module: nn.Module, name: str) -> bool:
    return isinstance(module[name], mx.array) and not name.startswith("_")


def _make_dense(model: nn.Module, path: str, module: nn.Module) -> None:
    for inner, part in list(module.named_modules()):
        if not is_quantised(part):
            continue
        made, whole = dense(part, type_of(model)), f"{path}.{inner}".strip(".")
        if made is None:
            raise InputError(
                f"adapter.modules_to_save: {whole} is quantised in a way that cannot be made dense, and "
                "packed weights cannot be trained. Leave it out"
            )
        model.update_modules(tree_unflatten([(whole, made)]))
    make_one(model, [path])


def type_of(model: nn.Module) -> mx.Dtype:
    """Returns the type that the model computes in: that of its arrays that are not packed."""
    packed = {id(array) for part in model.modules() if is_quantised(part) for array in part.values()}
    for _, array in tree_flatten(model.parameters()):
        if id(array) not in packed and mx.issubdtype(array.dtype, mx.floating):
            return array.dtype
    return mx.float32


def _last(path: str) -> str:
    return path.rpartition(".")[2]
