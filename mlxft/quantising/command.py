"""`mlxft quantize`: makes a model's layers trellis- or affine-quantised and writes what results."""

import json
import logging
import os
import shutil
import sys
import time
from collections.abc import Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Optional

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from mlxft.config.schema import Config, QuantizeConfig
from mlxft.data.example import Example
from mlxft.data.load import load_examples
from mlxft.errors import EXIT_DONE, GuardStop, InputError
from mlxft.evaluation.command import evaluate_config
from mlxft.export.folder import check_out, check_space, staged
from mlxft.models import audit
from mlxft.models.decoder import DecoderView, unchecked_view
from mlxft.models.dequantise import is_quantised
from mlxft.models.load import lazy_model, load_model, load_tokenizer, vocabulary_size
from mlxft.models.resolve import resolve
from mlxft.models.trellis.format import BITS
from mlxft.models.trellis.linear import TrellisLinear, section
from mlxft.quantising.trellis_model import Wanted, quantise_layers
from mlxft.sizes import written
from mlxft.training.disk import as_json, disk_guard

log = logging.getLogger("mlxft")

_AFFINE_BITS = (2, 3, 4, 5, 6, 8)
_ROTATION_SEED = 0
_NOT_COPIED = ("*.safetensors", "*.index.json", "*.gguf", "*.bin", "README.md", "config.json")
_COMPARED_TOKENS = 16
_SAME_LOGITS = 1e-2  # of the largest: the layers that are kept are rounded to the type that is stored


def main(arguments: list[str]) -> int:
    """Quantises what `arguments` describe and says what came of it; `--json`: as one object.

    Raises: InputError for a wrong configuration or model; GuardStop where the result can't be written or is
    not what was made.
    """
    from mlxft.config import compose

    composed = compose([text for text in arguments if text != "--json"], command="quantize")
    done = quantise(composed.config, composed.own)
    if "--json" in arguments:
        print(json.dumps(done, ensure_ascii=False))
    else:
        print("\n".join(f"{name}: {value}" for name, value in done.items() if value is not None))
    return EXIT_DONE


def quantise(config: Config, wanted: QuantizeConfig) -> dict[str, Any]:
    """Writes the quantised model to `wanted.out` and returns figures about it, by name. Raises: as `main`."""
    folder = resolve(config.model.path, config.model.revision)
    _check(config, wanted, folder)
    out = Path(wanted.out).expanduser()
    check_out(out)
    task = _Task(config, wanted, folder, out)
    try:
        return _quantise(task)
    except InputError:
        if task.unfinished.exists() and not task.has_finished():
            shutil.rmtree(task.unfinished)  # nothing is in it that a next run could take up
        raise


def _quantise(task: "_Task") -> dict[str, Any]:
    config, wanted, folder, out = task.config, task.wanted, task.folder, task.out
    calibration = task.calibration()
    before = None if config.data.valid is None else task.perplexity(folder)
    check_space(out, sum(file.stat().st_size for file in audit.weight_files(task.folder)))
    began = time.monotonic()
    with disk_guard(out, "Finished layers are kept beside it", "quantise again"), staged(out) as made:
        errors: dict[str, float] = {}
        if wanted.to == "trellis":
            errors = _write_trellis(task, calibration, made)
        else:
            _write_affine(task, made)
        seconds = time.monotonic() - began
        loaded = load_model(made)
        figures = _figures(made, loaded, task, seconds, errors)
        if before is not None:
            figures |= {"perplexity before": before, "perplexity after": task.perplexity(made)}
        (made / "README.md").write_text(_card(figures), encoding="utf-8")
    if task.unfinished.exists():
        shutil.rmtree(task.unfinished)
    return figures


def _warn_of_dense(model: nn.Module, group_size: int) -> list[str]:
    """Warns of layers whose rows can't be cut into groups, and stay as they are; returns their paths.

    Raises: InputError if that is all of them.
    """
    layers = {path: module for path, module in model.named_modules() if hasattr(module, "to_quantized")}
    left = [path for path, module in layers.items() if module.weight.shape[-1] % group_size]
    if left and len(left) == len(layers):
        raise InputError(f"group_size={group_size} divides the rows of no layer; give a smaller one")
    if left:
        log.warning(
            "%d of %d layers stay as they are, since group_size=%d does not divide their rows: %s%s",
            len(left), len(layers), group_size, ", ".join(left[:3]), " ..." * (len(left) > 3),
        )  # fmt: skip
    return left


def _check(config: Config, wanted: QuantizeConfig, folder: Path) -> None:
    """Raises InputError for keys that make no sense with each other."""
    default = QuantizeConfig()
    bits = BITS if wanted.to == "trellis" else _AFFINE_BITS
    if wanted.bits not in bits:
        raise InputError(f"bits={wanted.bits}: to={wanted.to} has {', '.join(map(str, bits))}")
    unused = ("group_size",) if wanted.to == "trellis" else ("rotate", "block")
    for name in unused:
        if getattr(wanted, name) != getattr(default, name):
            raise InputError(f"{name}: to={wanted.to} makes no use of it; leave it out")
    if wanted.to == "affine" and config.data.train is not None:
        raise InputError("data.train: to=affine reads no rows; leave it out, or use to=trellis")
    if wanted.calibration_rows != default.calibration_rows and config.data.train is None:
        raise InputError("calibration_rows: there are no rows to take them from; give data.train")
    if wanted.to == "affine" and _is_packed(folder):
        raise InputError(f"{folder} is quantised already; give the model that it was made from")


def _is_packed(folder: Path) -> bool:
    config = audit.read_json(folder / "config.json")
    return any(config.get(name) for name in ("quantization", "quantization_config", "trellis"))


@dataclass(frozen=True)
class _Task:
    """One quantisation: its configuration, the model's folder, where the result goes."""

    config: Config
    wanted: QuantizeConfig
    folder: Path
    out: Path

    @property
    def unfinished(self) -> Path:
        """Where finished layers wait for the rest, so that a run that was stopped goes on."""
        return self.out.parent / f".{self.out.name}.unfinished"

    def calibration(self) -> Optional[Sequence[Example]]:
        """Returns the rows of data.train, None where they are not given. Raises: InputError."""
        source = self.config.data.train
        if source is None:
            return None
        tokenizer = load_tokenizer(self.folder, required=self.config.data.format != "tokens")
        rows, _ = load_examples(source, self.config.data, tokenizer, vocabulary_size(self.folder))
        return rows

    def perplexity(self, folder: Path) -> str:
        """Returns the perplexity of the model in `folder` on data.valid, as `mlxft eval` finds it."""
        model = replace(self.config.model, path=str(folder), revision=None)
        found = evaluate_config(replace(self.config, model=model)).as_dict()
        if "perplexity" not in found:
            raise InputError("data.valid: it has to be rows to learn, which a model has a perplexity on")
        return f"{found['perplexity']:,.2f} ± {found['perplexity_stderr'] or 0:,.2f}"

    def settings(self) -> dict[str, Any]:
        """Returns what finished layers depend on."""
        files = [[str(file), *_dated(file)] for file in audit.weight_files(self.folder)]
        keys = (self.wanted.bits, self.wanted.rotate, self.wanted.block, self.wanted.calibration_rows)
        data = [str(self.config.data.train), self.config.data.max_length]
        return {"files": files, "keys": keys, "data": data}

    def has_finished(self) -> bool:
        """Tells whether a layer waits for the rest."""
        return any(self.unfinished.glob("layer-*.safetensors"))


def _dated(file: Path) -> tuple[int, int]:
    return file.stat().st_size, file.stat().st_mtime_ns


def _write_trellis(task: _Task, rows: Optional[Sequence[Example]], folder: Path) -> dict[str, float]:
    """Makes the model's layers trellis layers and writes it; returns their relative errors, by path.

    Weights are read where they are needed, so that one layer's are there at a time.
    """
    model, source = lazy_model(task.folder)
    made = unchecked_view(model)
    if rows is not None and not made.in_parts:
        raise InputError(
            f"data.train: models of type {made.family!r} run only as a whole, so nothing can be calibrated "
            "layer by layer; leave it out"
        )
    _prepare(task)
    wanted = Wanted(
        task.wanted.bits,
        _ROTATION_SEED if task.wanted.rotate else None,
        task.wanted.block,
        _stored_type(task.folder),
    )
    tokens = None
    if rows is not None:
        tokens = [rows[number].tokens for number in range(min(task.wanted.calibration_rows, len(rows)))]
    errors: dict[str, float] = {}
    for done in quantise_layers(made, wanted, tokens, task.unfinished):
        errors |= done.errors
        mean = sum(done.errors.values()) / max(len(done.errors), 1)
        log.info("layer %d of %d: relative squared error %.4f", done.index + 1, made.num_layers, mean)
    if not errors:
        raise InputError(f"{task.folder} has no dense linear layer in its decoder: it is quantised already")
    named = model.named_modules()
    geometry = {path: layer.geometry for path, layer in named if type(layer) is TrellisLinear}
    config = _without_packing(source, model) | {"trellis": section(geometry, wanted.rotation)}
    shutil.copytree(task.folder, folder, ignore=shutil.ignore_patterns(*_NOT_COPIED), dirs_exist_ok=True)
    (folder / "config.json").write_text(as_json(config), encoding="utf-8")
    _write_shards(made, wanted.stored, task.unfinished, folder)
    _check_same(model, load_model(folder), vocabulary_size(task.folder))
    return errors


def _prepare(task: _Task) -> None:
    """Makes the folder of finished layers, empty unless they are of the same model and settings."""
    note, settings = task.unfinished / "settings.json", as_json(task.settings())
    if note.exists() and note.read_text() == settings:
        log.info("going on with the layers in %s", task.unfinished)
        return
    shutil.rmtree(task.unfinished, ignore_errors=True)
    task.unfinished.mkdir(parents=True)
    note.write_text(settings)


def _write_shards(made: DecoderView, stored: mx.Dtype, layers: Path, folder: Path) -> None:
    """Writes a shard for each layer, one for the rest, and the index."""
    files = sorted(layers.glob("layer-*.safetensors"))
    inside = {id(array) for layer in made.layers for _, array in tree_flatten(layer.parameters())}
    rest = {
        name: array.astype(stored) if mx.issubdtype(array.dtype, mx.floating) else array
        for name, array in tree_flatten(made.model.parameters())
        if id(array) not in inside
    }
    names = [f"model-{number:05d}-of-{len(files) + 1:05d}.safetensors" for number in range(1, len(files) + 2)]
    for file, name in zip(files, names, strict=False):
        shutil.copyfile(file, folder / name)
    mx.save_safetensors(str(folder / names[-1]), rest, {"format": "mlx"})
    places = {tensor: name for name in names for tensor in audit.tensor_names(folder / name)}
    total = sum((folder / name).stat().st_size for name in names)
    index = {"metadata": {"total_size": total}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(as_json(index), encoding="utf-8")


def _write_affine(task: _Task, folder: Path) -> None:
    """Quantises the model by mlx-lm, which also writes it."""
    from mlx_lm import convert

    _warn_of_dense(lazy_model(task.folder)[0], task.wanted.group_size)
    made = folder / "converted"
    with redirect_stdout(sys.stderr):
        convert(
            str(task.folder),
            str(made),
            quantize=True,
            q_bits=task.wanted.bits,
            q_group_size=task.wanted.group_size,
        )
    for file in made.iterdir():
        os.replace(file, folder / file.name)
    made.rmdir()


def _without_packing(config: dict[str, Any], model: nn.Module) -> dict[str, Any]:
    """Returns the configuration without that of affine layers, where none is left."""
    if any(is_quantised(module) and type(module) is not TrellisLinear for module in model.modules()):
        return config
    return {name: value for name, value in config.items() if not name.startswith("quantization")}


def _stored_type(folder: Path) -> mx.Dtype:
    """Returns the type of most of the numbers in a checkpoint that aren't packed."""
    sizes: dict[mx.Dtype, int] = {}
    for file in audit.weight_files(folder):
        for array in mx.load(str(file)).values():
            if mx.issubdtype(array.dtype, mx.floating):
                sizes[array.dtype] = sizes.get(array.dtype, 0) + array.size
    return max(sizes, key=sizes.__getitem__, default=mx.bfloat16)


def _check_same(made: nn.Module, loaded: nn.Module, vocabulary: int) -> None:
    """Raises GuardStop unless the model that was written gives the logits of the one that was made."""
    tokens = mx.arange(_COMPARED_TOKENS)[None] % vocabulary
    own, read = made(tokens).astype(mx.float32), loaded(tokens).astype(mx.float32)
    apart = mx.abs(own - read).max() / mx.abs(own).max()
    if not apart.item() < _SAME_LOGITS:
        raise GuardStop(
            f"what was written gives other logits than what was made (by {apart.item():.1e} of the largest), "
            "which is a fault of mlxft or of the disk. Nothing was kept"
        )


def _figures(folder: Path, loaded: nn.Module, task: _Task, seconds: float, errors: dict[str, float]) -> dict:
    """Returns what there is to say of the result, by name; None for what is not known."""
    num_bytes = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    num_weights = sum(array.size for _, array in tree_flatten(loaded.parameters()))
    geometry = json.loads((folder / "config.json").read_text()).get("trellis", {}).get("modules", {})
    blocks = sorted({entry["block"] for entry in geometry.values()})
    return {
        "model": task.config.model.path,
        "out": str(task.out),
        "to": task.wanted.to,
        "bits": task.wanted.bits,
        "blocks": ", ".join(map(str, blocks)) or None,
        "rotated": task.wanted.rotate if geometry else None,
        "calibrated on": None if task.config.data.train is None else str(task.config.data.train),
        "bits a weight": round(8 * num_bytes / num_weights, 3),
        "size": written(num_bytes),
        "relative squared error": round(sum(errors.values()) / len(errors), 5) if errors else None,
        "peak memory": written(mx.get_peak_memory()),
        "seconds": round(seconds, 1),
    }


def _card(figures: dict[str, Any]) -> str:
    """Returns the README of the folder: what it was made from, how, and what was measured."""
    front = f"---\nbase_model: {json.dumps(figures['model'])}\nlibrary_name: mlxft\ntags:\n- quantized\n---\n"
    rows = "\n".join(f"| {name} | {value} |" for name, value in figures.items() if value is not None)
    use = "mlxft generate model.path=FOLDER prompt=\"Who are you?\""
    return (
        f"{front}\n# {Path(str(figures['model'])).name}, {figures['bits']} bits ({figures['to']})\n\n"
        "Quantised by `mlxft quantize`. \"bits a weight\" counts everything in the files.\n\n"
        f"| | |\n|---|---|\n{rows}\n\n```bash\n{use}\n```\n"
    )
