"""A model folder with the adapter in its weights, as the base's own publisher would have written it.

The base's files are the pattern: every tensor keeps its name and, where nothing changed it, its bits. So what
reads the base reads the merged model, transformers as well as mlx-lm. A changed layer of a quantised base

    mixed    becomes dense, in the type that the base's scales have; the configuration says so
    none     becomes dense, as do all others
    same     is quantised again as it was
"""

import json
import re
import shutil
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Optional

import mlx.core as mx
import mlx.nn as nn

from mlxft.config.choices import is_embedding
from mlxft.config.schema import ExportConfig
from mlxft.errors import InputError
from mlxft.export.folder import check_space
from mlxft.export.merging import Change, Changes, Update, dense_weight
from mlxft.models import audit
from mlxft.models.dequantise import is_quantised, num_packed_values
from mlxft.models.load import sanitized
from mlxft.models.whole_modules import type_of

MAX_SHARD_BYTES = 5_000_000_000  # as transformers writes them
INDEX = "model.safetensors.index.json"
PACKED = ("weight", "scales", "biases")

_SAID_FROM = 1e-4  # rounding that is less is not worth a line

_WITH_THE_MODEL = ("*.json", "tokenizer.model", "*.tiktoken", "*.txt", "*.jinja")
_NOT_COPIED = ("config.json", INDEX, "hf_quant_config.json", "manifest.json")
_EXPERTS = re.compile(r"\.switch_mlp\.(\w+\.\w+)$")  # mlx-lm's name of all in one, after that of the block


@dataclass(frozen=True)
class Rounding:
    """What writing did to the adapter's own change of a layer: |written - merged| / |merged - base|."""

    layer: str
    error: float


@dataclass
class Report:
    """What was written. dense, packed: how many changed layers of a quantised base are now which."""

    roundings: list[Rounding] = field(default_factory=list)
    dense: int = 0
    packed: int = 0

    def lines(self) -> list[tuple[str, str]]:
        """Returns (name, value) as text, for people."""
        lines = []
        if self.dense or self.packed:
            kinds = [
                f"{number} {what}"
                for number, what in ((self.dense, "dense"), (self.packed, "packed"))
                if number
            ]
            lines.append(("changed layers", f"{', '.join(kinds)}; the base is quantised"))
        worst = max(self.roundings, key=lambda rounding: rounding.error, default=None)
        if worst is not None and worst.error >= _SAID_FROM:
            middle = statistics.median(rounding.error for rounding in self.roundings)
            lines.append(
                (
                    "rounding of the adapter's change",
                    f"{middle:.1%} of a layer's in the middle, at most {worst.error:.1%} ({worst.layer})",
                )
            )
        return lines


@dataclass(frozen=True)
class Place:
    """What a checkpoint's tensor is to the model: the array's name, and which expert's of one for all."""

    name: str
    expert: Optional[int] = None


@dataclass(frozen=True)
class Tensor:
    """A tensor to write: its name in the checkpoint, its size, and what makes it."""

    name: str
    num_bytes: int
    made: Callable[[], mx.array]


class MergedModel:
    """The base in `folder` with `changes`. stored, config: its model as it is stored.

    vocabulary: how many tokens the merged model has, None for as many as the base.
    """

    def __init__(
        self,
        folder: Path,
        stored: nn.Module,
        config: dict[str, Any],
        changes: Changes,
        export: ExportConfig,
        vocabulary: Optional[int] = None,
    ):
        self.folder = folder
        self.vocabulary = vocabulary
        self.changes = changes
        self.export = export
        self.modules = dict(stored.named_modules())
        self.checkpoint = {
            name: array for file in audit.weight_files(folder) for name, array in mx.load(str(file)).items()
        }
        self.dense_type = type_of(stored) if export.dtype == "auto" else getattr(mx, export.dtype)
        self.places = _places(config, self.checkpoint)
        self.report = Report()
        self._packed: dict[str, tuple[mx.array, ...]] = {}
        known = {place.name for place in self.places.values()}
        if unknown := sorted(changes.by_name.keys() - known):
            raise InputError(
                f"{folder} has {len(unknown)} of the changed weights under other names, or several in one "
                f"tensor, so they cannot be put in their place: {audit.listed(unknown, 3)}. Use to=peft"
            )

    def write(self, out: Path) -> Report:
        """Writes configuration, tokenizer and weights into `out`, and returns what became of the changes.

        Raises: GuardStop if there is no room.
        """
        tensors = list(self.tensors())
        check_space(out, sum(tensor.num_bytes for tensor in tensors))
        copy_all_but_weights(self.folder, out)
        text = json.dumps(self._config(), indent=2, ensure_ascii=False)
        (out / "config.json").write_text(text + "\n", encoding="utf-8")
        _write_shards(out, tensors)
        return self.report

    def tensors(self) -> Iterator[Tensor]:
        """Yields every tensor of the merged model, by name."""
        for name, array in sorted(self.checkpoint.items()):  # so that a layer's packed arrays stand together
            place = self.places.get(name)
            path, _, own = ("", "", "") if place is None else place.name.rpartition(".")
            module = self.modules.get(path)
            if module is not None and is_quantised(module) and own in PACKED:
                yield from self._of_packed(name, array, path, own)
            else:
                yield self._of_dense(name, array, place)

    def _of_dense(self, name: str, array: mx.array, place: Optional[Place]) -> Tensor:
        is_float = mx.issubdtype(array.dtype, mx.floating)
        dtype = array.dtype if self.export.dtype == "auto" or not is_float else self.dense_type
        change = None if place is None else self.changes.by_name.get(place.name)
        if change is None:
            return Tensor(name, array.size * dtype.size, lambda: array.astype(dtype))
        return Tensor(name, array.size * dtype.size, lambda: self._rounded(name, change, dtype, place.expert))

    def _of_packed(self, name: str, array: mx.array, path: str, own: str) -> Iterator[Tensor]:
        change, module = self.changes.by_name.get(f"{path}.weight"), self.modules[path]
        how = self.export.quantization
        if change is None and how != "none":
            yield Tensor(name, array.nbytes, lambda: array)
        elif change is not None and how == "same":
            yield Tensor(name, array.nbytes, lambda: self._quantised_again(path, change)[PACKED.index(own)])
            self.report.packed += own == "weight"
        elif own == "weight":
            num_bytes = num_packed_values(module) * self.dense_type.size
            self.report.dense += change is not None
            if change is None:
                yield Tensor(name, num_bytes, lambda: dense_weight(module).astype(self.dense_type))
            else:
                yield Tensor(name, num_bytes, lambda: self._rounded(name, change, self.dense_type))

    def _rounded(self, name: str, change: Change, dtype: mx.Dtype, expert: Optional[int] = None) -> mx.array:
        """Returns the merged array in `dtype`, one expert's of those in one, and notes what rounding did."""
        merged = change.merged(expert)
        written = merged.astype(dtype)
        self._note(name, change, merged, written, expert)
        return written

    def _quantised_again(self, path: str, change: Change) -> tuple[mx.array, ...]:
        """Returns the packed arrays of the merged weight, made once for all of them."""
        if path not in self._packed:
            module, merged = self.modules[path], change.merged()
            if "global_scale" in module:
                raise InputError(
                    f"quantization=same: {path} has a scale of its own for all groups, which is "
                    "not made again here. Use quantization=mixed or none"
                )
            how = {"group_size": module.group_size, "bits": module.bits, "mode": module.mode}
            packed = mx.quantize(merged.astype(self.dense_type), **how)
            unpacked = mx.dequantize(*packed, **how, dtype=mx.float32)
            self._note(f"{path}.weight", change, merged, unpacked)
            self._packed = {path: packed}  # the last one only: its arrays are written one after another
        return self._packed[path]

    def _note(
        self, name: str, change: Change, merged: mx.array, written: mx.array, expert: Optional[int] = None
    ) -> None:
        if not isinstance(change, Update):
            return
        own = mx.linalg.norm(merged - change.base(expert)).item()
        if own > 0:
            error = mx.linalg.norm(written.astype(mx.float32) - merged).item() / own
            self.report.roundings.append(Rounding(name.removesuffix(".weight"), error))

    def _config(self) -> dict[str, Any]:
        """Returns the base's configuration with what the written weights are."""
        config = audit.read_json(self.folder / "config.json")
        keys = ("quantization", "quantization_config")
        for part in (config, config.get("text_config")):
            if not isinstance(part, dict):
                continue
            if self.vocabulary is not None and "vocab_size" in part:
                part["vocab_size"] = self.vocabulary
            if self.export.dtype != "auto":
                part |= {key: self.export.dtype for key in ("dtype", "torch_dtype") if key in part}
            for key in keys:
                if self.export.quantization == "none":
                    part.pop(key, None)
                elif self.export.quantization == "mixed" and isinstance(part.get(key), dict):
                    part[key] = {**part[key], **self._dense_in_config()}
        return config

    def _dense_in_config(self) -> dict[str, bool]:
        return {path: False for path in sorted(self.changes.modules) if is_quantised(self.modules[path])}


def _places(config: dict[str, Any], checkpoint: dict[str, mx.array]) -> dict[str, Place]:
    """Returns the place of each tensor of the checkpoint that the model has as it is, by name.

    The family's own `sanitize` tells: what goes through it unchanged has the place it comes out at. Experts
    that it stacks are found by their names.
    """
    loaded = sanitized(config, checkpoint)
    by_identity = {id(array): name for name, array in checkpoint.items()}
    places = {}
    for name, array in loaded.items():
        if id(array) in by_identity:
            places[by_identity[id(array)]] = Place(name)
            continue
        if not _EXPERTS.search(name):
            continue
        experts = [_EXPERTS.sub(rf".experts.{number}.\1", name) for number in range(array.shape[0])]
        if all(name in checkpoint and checkpoint[name].shape == array.shape[1:] for name in experts):
            places |= {expert: Place(name, number) for number, expert in enumerate(experts)}
    if not any(
        place.name.endswith("lm_head.weight") for place in places.values()
    ):  # the embedding is the head
        tied = [place for place in places.values() if is_embedding(place.name.removesuffix(".weight"))]
        heads = [name for name in checkpoint if name.endswith("lm_head.weight") and name not in places]
        places |= {name: tied[0] for name in heads if tied}
    return places


def copy_all_but_weights(folder: Path, out: Path) -> None:
    """Copies what a model's folder has beside its weights: configuration, tokenizer, template."""
    for pattern in _WITH_THE_MODEL:
        for file in sorted(folder.glob(pattern)):
            if file.name not in _NOT_COPIED:
                shutil.copyfile(file, out / file.name)


def _write_shards(out: Path, tensors: Sequence[Tensor]) -> None:
    """Writes model.safetensors, or shards of at most MAX_SHARD_BYTES with their index."""
    shards: list[list[Tensor]] = [[]]
    for tensor in tensors:
        if shards[-1] and sum(other.num_bytes for other in shards[-1]) + tensor.num_bytes > MAX_SHARD_BYTES:
            shards.append([])
        shards[-1].append(tensor)
    weight_map = {}
    for number, shard in enumerate(shards, 1):
        name = "model.safetensors"
        if len(shards) > 1:
            name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        arrays = {}
        for tensor in shard:
            arrays[tensor.name] = tensor.made()
            mx.eval(arrays[tensor.name])  # one after another: float32 copies of all would not fit
            weight_map[tensor.name] = name
        mx.save_safetensors(str(out / name), arrays, metadata={"format": "pt"})
    if len(shards) > 1:
        total = sum(tensor.num_bytes for tensor in tensors)
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
        (out / INDEX).write_text(json.dumps(index, indent=2) + "\n")
