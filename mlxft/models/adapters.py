"""Adapter folders: written and read in mlx-lm's layout and PEFT's."""

import json
import os
import shutil
import tempfile
from collections.abc import Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Optional

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_unflatten

from mlxft.config.choices import is_embedding
from mlxft.config.schema import AdapterConfig
from mlxft.errors import InputError
from mlxft.models import mlxlm_adapter, peft_adapter
from mlxft.models.adapter_tensors import Adapter, LowRank, described
from mlxft.models.fitting import Fitted, added_up, check_new_tokens, fit, refuse
from mlxft.models.lora_linear import AdaptedLayer, set_siblings
from mlxft.models.low_rank import wrapped
from mlxft.models.new_rows import BIAS, ROWS, make_one, train_new_rows
from mlxft.models.new_tokens import described as new_tokens_described
from mlxft.models.new_tokens import new_tokens_of
from mlxft.models.targets import adaptable_layers
from mlxft.models.whole_modules import set_arrays, train_whole, whole_arrays, whole_paths


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


def start_of(
    model: nn.Module, folders: str | Path | Sequence[str | Path], weights: Optional[Sequence[float]] = None
) -> Fitted:
    """Returns the adapter in a folder, fitted to `model`; of several their sum, each times its weight.

    Raises: InputError listing what does not fit, and for whole models' weights.
    """
    folders = [folders] if isinstance(folders, (str, Path)) else list(folders)
    adapters = [read_adapter(folder) for folder in folders]
    for adapter in adapters:
        if adapter.kind == "full":
            if len(adapters) > 1 or weights is not None:
                raise InputError(f"{adapter.folder} holds whole weights, which cannot be added up or weighed")
            raise InputError(f"adapter.kind=lora contradicts adapter.init_from={adapter.folder}, which holds "
                             "whole weights; use adapter.kind=full")
    fitted = [fit(adapter, model) for adapter in adapters]
    if len(fitted) == 1 and weights is None:
        return fitted[0]
    return added_up(fitted, weights or [1.0] * len(fitted), model)


def load_adapter(
    model: nn.Module,
    folders: str | Path | Sequence[str | Path],
    dropout: float = 0.0,
    weights: Optional[Sequence[float]] = None,
    lazily: bool = False,
) -> list[str]:
    """Puts the adapter in a folder on `model`, or the sum of several, with their own ranks and scales.

    Returns the paths of the adapted layers ("*" if the folder holds whole weights). LoRA: all but the
    new arrays is frozen. lazily: whole weights are not read.
    Raises: InputError listing tensors that the model has no place for, wrong shapes, missing ones.
    """
    if isinstance(folders, (str, Path)) and weights is None:
        adapter = read_adapter(folders)
        if adapter.kind == "full":
            check_new_tokens(adapter, model)
            make_one(model)
            _load_weights(model, adapter)
            if not lazily:
                mx.eval(model.parameters())
            return ["*"]
    fitted = start_of(model, folders, weights)
    attach(model, fitted, dropout)
    return [layer.path for layer, _ in fitted.updates]


def attach(
    model: nn.Module, fitted: Fitted, dropout: float = 0.0, modules: Optional[Sequence[str]] = None
) -> None:
    """Freezes `model` and puts trainable low-rank updates (float32) on its layers, in place.

    Rows of new tokens are trained too. modules: paths of those that are trained whole, None for those that
    `fitted` has arrays of.
    """
    model.freeze()
    outside = len(model.layers)  # the block number of layers that are in none
    layers = []
    for layer, low in fitted.updates:
        place = (outside if layer.block is None else layer.block, layer.slot)
        layers.append((layer.path, wrapped(layer, low, fitted.kind, dropout, place)))
    model.update_modules(tree_unflatten(layers))
    set_siblings(model.modules())
    train_whole(model, fitted.modules if modules is None else modules)
    train_new_rows(model)
    set_arrays(model, fitted.whole)


def settle(model: nn.Module) -> None:
    """Computes what the adapter's arrays start from, a layer at a time: of DoRA that takes whole weights."""
    for module in model.modules():
        if isinstance(module, AdaptedLayer):
            mx.eval([array for array in module.values() if isinstance(array, mx.array)])


def save_adapter(
    folder: str | Path, model: nn.Module, cfg: AdapterConfig, base: str, tokenizer: Any = None
) -> None:
    """Writes what was trained on `model` into `folder` in mlx-lm's layout, over what is there.

    `mlx_lm.load(base, adapter_path=folder)` then gives the same model, if no module was trained whole and
    there are no new tokens: those it refuses by name. tokenizer: the model's, written beside the adapter of
    a model with new tokens. Each file appears whole or not at all, the configuration last. Raises: OSError
    if it can't be written.
    """
    if cfg.kind == "full":
        tensors = dict(tree_flatten(model.parameters()))
        config = {"fine_tune_type": "full", "num_layers": len(model.layers)}
    else:
        tensors, config = _low_rank_content(model, cfg)
    if new := new_tokens_of(model):
        config[mlxlm_adapter.NEW_TOKENS] = new_tokens_described(new)
        if tokenizer is not None:
            _write_tokenizer(Path(folder), tokenizer)
    _write(Path(folder), mlxlm_adapter, tensors, {"model": base, **config})


def save_peft_adapter(folder: str | Path, model: nn.Module, base: str) -> None:
    """Writes the low-rank updates on `model`, and its modules that are whole, into `folder` in PEFT's layout.

    Raises: InputError for what the layout has no word for; OSError if it can't be written.
    """
    whole = whole_arrays(model)
    rows = [name for name in whole if name.rpartition(".")[2] in (ROWS, BIAS)]
    if rows:
        raise InputError(
            f"PEFT's layout has no rows of new tokens by themselves, as {rows[0]} is here. Train the table "
            "whole (adapter.modules_to_save), which it has a word for"
        )
    is_tied = not any(path.rpartition(".")[2] == "lm_head" for path, _ in model.named_modules())
    if is_tied:
        for name, array in list(whole.items()):
            if is_embedding(name.rpartition(".")[0]):
                whole["lm_head.weight"] = array
    _write(Path(folder), peft_adapter, *peft_adapter.write_content(updates_of(model), whole, base, is_tied))


def updates_of(model: nn.Module) -> dict[str, LowRank]:
    """Returns the updates on `model` by path. Raises: ValueError if there are none."""
    updates = {
        path: LowRank(module.lora_a, module.lora_b, module.scale, module.get("m"))
        for path, module in model.named_modules()
        if isinstance(module, AdaptedLayer)
    }
    if not updates:
        raise ValueError("the model has no LoRA layers to save")
    return updates


def even_updates(model: nn.Module) -> dict[str, LowRank]:
    """Returns the updates on `model` by path, at one rank and scale."""
    return mlxlm_adapter.at_one_rank(updates_of(model))


def _low_rank_content(model: nn.Module, cfg: AdapterConfig) -> tuple[dict[str, mx.array], dict]:
    updates, tensors = even_updates(model), whole_arrays(model)
    rank, scale = next((low.rank, low.scale) for low in updates.values())
    for path, low in sorted(updates.items()):
        tensors |= {f"{path}.lora_a": low.a, f"{path}.lora_b": low.b}
        tensors |= {} if low.m is None else {f"{path}.m": low.m}
    num_layers, keys = mlxlm_adapter.layers_config(adaptable_layers(model), set(updates))
    parameters = {"rank": rank, "scale": scale, "dropout": cfg.dropout, "keys": keys}
    config = {"fine_tune_type": cfg.kind, "num_layers": num_layers, "lora_parameters": parameters}
    whole = whole_paths(model)
    return tensors, config | ({"modules_to_save": whole} if whole else {})


def _write_tokenizer(folder: Path, tokenizer: Any) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as written:
        tokenizer.save_pretrained(written)
        for file in sorted(Path(written).iterdir()):
            with _whole(folder / file.name) as partial:
                shutil.copyfile(file, partial)


def _write(folder: Path, layout: Any, tensors: dict[str, mx.array], config: dict) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with _whole(folder / layout.WEIGHTS) as partial, open(partial, "wb") as file:
        mx.save_safetensors(file, tensors, metadata={"format": "mlx" if layout is mlxlm_adapter else "pt"})
    with _whole(folder / layout.CONFIG) as partial:
        partial.write_text(json.dumps(config, indent=1) + "\n")


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
    refuse(adapter.folder, {"not in the model": unknown, "wrong shape": wrong})
    model.update(tree_unflatten([(name, w.astype(own[name].dtype)) for name, w in given.items()]))
