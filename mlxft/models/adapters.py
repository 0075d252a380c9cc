"""Adapter folders: written in mlx-lm's layout, read in mlx-lm's and PEFT's."""

import json
import os
import re
from contextlib import contextmanager
from pathlib import Path
from typing import Optional

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_unflatten

from mlxft.config.schema import AdapterConfig
from mlxft.errors import InputError
from mlxft.models import audit, mlxlm_adapter, peft_adapter
from mlxft.models.adapter_tensors import Adapter, LowRank, described
from mlxft.models.frozen_linear import dimensions
from mlxft.models.lora_linear import LoRALinear, share_inputs
from mlxft.models.targets import LinearLayer, linear_layers

# Where other libraries keep a text model's blocks; the number and what follows it are the same.
_BLOCK_PATH = re.compile(r"(?:model|language_model|model\.language_model|language_model\.model)"
                         r"\.layers\.(\d+)\.(.+)")


def read_adapter(folder: str | Path) -> Adapter:
    """Returns the adapter in `folder`, in mlx-lm's layout or PEFT's.

    Raises: InputError naming the folder, file or tensor that is wrong or not supported.
    """
    folder = Path(folder).expanduser()
    try:
        names = set(os.listdir(folder))
    except OSError as error:
        raise InputError(f"the adapter folder {folder} cannot be read: {error.strerror}") from error
    for layout in (mlxlm_adapter, peft_adapter):
        if layout.WEIGHTS in names:
            if layout.CONFIG not in names:
                raise InputError(f"{folder} has {layout.WEIGHTS} but no {layout.CONFIG}")
            return layout.read(folder)
    raise InputError(f"{folder} has no adapter: expected {mlxlm_adapter.WEIGHTS} (mlx-lm) or "
                     f"{peft_adapter.WEIGHTS} (PEFT), found {', '.join(sorted(names)[:8]) or 'nothing'}")


def load_adapter(model: nn.Module, folder: str | Path, dropout: float = 0.0) -> list[str]:
    """Puts the adapter in `folder` on `model`, with the folder's own ranks and scales.

    Returns the paths of the adapted layers ("*" if the folder holds whole weights). LoRA: all but the
    new arrays is frozen.
    Raises: InputError listing tensors that the model has no place for, wrong shapes, missing ones.
    """
    adapter = read_adapter(folder)
    if adapter.kind == "full":
        _load_weights(model, adapter)
        return ["*"]
    fitted = fit(adapter, model)
    attach(model, fitted, dropout)
    return [layer.path for layer, _ in fitted]


def attach(model: nn.Module, updates: list[tuple[LinearLayer, LowRank]], dropout: float = 0.0) -> None:
    """Freezes `model` and puts trainable low-rank updates (float32) on its layers, in place."""
    model.freeze()
    outside = len(model.layers)  # the block number of layers that are in none
    wrapped = []
    for layer, low in updates:
        place = (outside if layer.block is None else layer.block, layer.slot)
        a, b = low.a.astype(mx.float32), low.b.astype(mx.float32)
        wrapped.append((layer.path, LoRALinear(layer.module, a, b, low.scale, dropout, place)))
    model.update_modules(tree_unflatten(wrapped))
    share_inputs(model.modules())


def fit(adapter: Adapter, model: nn.Module) -> list[tuple[LinearLayer, LowRank]]:
    """Returns the adapter's updates with the model's layers they belong to.

    Raises: InputError listing what does not fit, by name.
    """
    linears = linear_layers(model)
    by_path = {layer.path: layer for layer in linears}
    by_place = {(layer.block, layer.name): layer for layer in linears}
    fitted, unknown, wrong = [], [], []
    for path, low in adapter.layers.items():
        layer = by_path.get(path) or _at_block(path, by_place)
        if layer is None:
            unknown.append(f"{path} (lora_a {tuple(low.a.shape)}, lora_b {tuple(low.b.shape)})")
            continue
        inputs, outputs = dimensions(layer.module)
        if (low.a.shape[0], low.b.shape[1]) != (inputs, outputs):
            wrong.append(f"{path} {low.a.shape[0]} to {low.b.shape[1]} instead of {inputs} to {outputs}")
        fitted.append((layer, low))
    present = {layer.path for layer, _ in fitted}
    missing = sorted(adapter.chosen(linears) - present)
    _refuse(adapter.folder, {"no such linear layer in the model": unknown, "wrong shape": wrong,
                             "missing in the adapter, though its configuration names them": missing})
    if not fitted:
        raise InputError(f"the adapter in {adapter.folder} holds no tensors")
    return fitted


def save_adapter(folder: str | Path, model: nn.Module, cfg: AdapterConfig, base: str) -> None:
    """Writes what was trained on `model` into `folder` in mlx-lm's layout, over what is there.

    `mlx_lm.load(base, adapter_path=folder)` then gives the same model. Each file appears whole or not
    at all, the configuration last. Raises: OSError if it can't be written.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    if cfg.kind == "full":
        tensors = dict(tree_flatten(model.parameters()))
        config = {"fine_tune_type": "full", "num_layers": len(model.layers)}
    else:
        tensors, config = _low_rank_content(model, cfg)
    with _whole(folder / mlxlm_adapter.WEIGHTS) as partial, open(partial, "wb") as file:
        mx.save_safetensors(file, tensors, metadata={"format": "mlx"})
    with _whole(folder / mlxlm_adapter.CONFIG) as partial:
        partial.write_text(json.dumps({"model": base, **config}, indent=1) + "\n")


def _low_rank_content(model: nn.Module, cfg: AdapterConfig) -> tuple[dict[str, mx.array], dict]:
    wrapped = {path: module for path, module in model.named_modules() if isinstance(module, LoRALinear)}
    if not wrapped:
        raise ValueError("the model has no LoRA layers to save")
    even = mlxlm_adapter.at_one_rank(
        {path: LowRank(module.lora_a, module.lora_b, module.scale) for path, module in wrapped.items()})
    places = linear_layers(model)
    rank, scale = next((low.rank, low.scale) for low in even.values())
    tensors = {}
    for path, low in sorted(even.items()):
        tensors |= {f"{path}.lora_a": low.a, f"{path}.lora_b": low.b}
    return tensors, mlxlm_adapter.lora_config(places, set(wrapped), rank, scale, cfg.dropout)


@contextmanager
def _whole(final: Path):
    """Gives a path to write to; what was written becomes `final` at once, or goes if the block fails."""
    partial = final.with_name(f".partial-{final.name}")
    try:
        yield partial
        with open(partial, "rb") as handle:
            os.fsync(handle.fileno())
        os.replace(partial, final)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    directory = os.open(final.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def _load_weights(model: nn.Module, adapter: Adapter) -> None:
    """Replaces the model's weights by the folder's, in the model's own types."""
    own = dict(tree_flatten(model.parameters()))
    given = adapter.weights
    unknown = [described(name, w) for name, w in given.items() if name not in own]
    wrong = [f"{described(name, w)} instead of {tuple(own[name].shape)}" for name, w in given.items()
             if name in own and own[name].shape != w.shape]
    _refuse(adapter.folder, {"not in the model": unknown, "wrong shape": wrong})
    model.update(tree_unflatten([(name, w.astype(own[name].dtype)) for name, w in given.items()]))
    mx.eval(model.parameters())


def _at_block(path: str, by_place: dict[tuple[Optional[int], str], LinearLayer]) -> Optional[LinearLayer]:
    match = _BLOCK_PATH.fullmatch(path)
    return by_place.get((int(match[1]), match[2])) if match else None


def _refuse(folder: Path, problems: dict[str, list[str]]) -> None:
    lines = [f"{len(names)} x {what}: {audit.listed(names)}" for what, names in problems.items() if names]
    if lines:
        raise InputError(f"the adapter in {folder} does not fit the model:\n  " + "\n  ".join(lines))
