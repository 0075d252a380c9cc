"""GGUF files of a merged model and of a LoRA adapter: written, and read back to what was written.

    model      {arch}.* settings, tokenizer.*, one tensor a weight
    adapter    adapter.lora.alpha; TENSOR.lora_a (r, in), TENSOR.lora_b (out, r), for each TENSOR of the model

Source: the GGUF specification (ggml-org/ggml, docs/gguf.md) and the names of the package gguf.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import gguf
import mlx.core as mx
import numpy as np

from mlxft.config.choices import is_embedding
from mlxft.errors import InputError
from mlxft.export.gguf_families import (
    Config,
    Family,
    family_of,
    from_gguf,
    rope_factors,
    settings_of,
    text_config,
    to_gguf,
)
from mlxft.export.merging import Weight
from mlxft.models.adapter_tensors import LowRank

TYPES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}

_FILE_TYPES = {"F32": gguf.LlamaFileType.ALL_F32, "F16": gguf.LlamaFileType.MOSTLY_F16,
               "BF16": gguf.LlamaFileType.MOSTLY_BF16}  # fmt: skip
_ROUTER = "ffn_gate_inp"  # of experts: llama.cpp wants it in float32
_EXPERTS = ".switch_mlp."


class Names:
    """What GGUF calls the weights of a model: (name in mlx-lm) -> name."""

    def __init__(self, config: Config):
        self.family = family_of(config)
        self.config = text_config(config)
        arch = {name: key for key, name in gguf.MODEL_ARCH_NAMES.items()}[self.family.arch]
        self._map = gguf.get_tensor_name_map(arch, self.config["num_hidden_layers"])

    def of(self, name: str) -> str:
        """Returns the tensor's name. Raises: InputError for a weight that the family has none for."""
        plain = name.removeprefix("language_model.").replace(_EXPERTS, ".experts.")
        found = self._map.get_name(plain, try_suffixes=(".weight", ".bias"))
        if found is None:
            raise InputError(f"to=gguf: GGUF's {self.family.arch} has no place for {name}; use to=merged")
        return found


def write_model(
    file: Path, config: Config, tensors: Iterable[Weight], kind: str, about: Mapping[str, Any]
) -> None:
    """Writes the model that `config` describes, matrices in the type `kind` (F32, BF16, F16), one at a time.

    about: tokenizer fields and general ones, as `fields` of `_write_fields`. Raises: InputError.
    """
    names = Names(config)
    writer = gguf.GGUFWriter(file, names.family.arch)
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    writer.add_file_type(_FILE_TYPES[kind])
    settings = settings_of(names.config, names.family)
    _write_fields(writer, {f"{names.family.arch}.{name}": value for name, value in settings.items()} | about)
    made: list[Callable[[], np.ndarray]] = []
    factors = rope_factors(names.config)
    if factors is not None:
        made.append(_announced(writer, "rope_freqs.weight", factors.shape, "F32", lambda: factors))
    for tensor in tensors:
        name = names.of(tensor.name)
        of_kind = "F32" if len(tensor.shape) == 1 or _ROUTER in name else kind

        def values(tensor: Weight = tensor) -> np.ndarray:
            return to_gguf(tensor.name, np.array(tensor.made()), names.family, names.config)

        made.append(_announced(writer, name, tensor.shape, of_kind, values))
    _write_all(writer, made)


def write_adapter(
    file: Path, config: Config, updates: Mapping[str, LowRank], about: Mapping[str, Any]
) -> None:
    """Writes the updates, by the model's paths, as a LoRA adapter in float32.

    llama.cpp has one alpha for all layers and divides it by each one's rank: what a layer's scale is beside
    that goes into its lora_b. Raises: InputError for updates that the form has no word for.
    """
    names = Names(config)
    first = next(iter(updates.values()))
    alpha = first.scale * first.rank
    writer = gguf.GGUFWriter(file, names.family.arch)
    writer.add_type(gguf.GGUFType.ADAPTER)
    writer.add_string(gguf.Keys.Adapter.TYPE, "lora")
    writer.add_float32(gguf.Keys.Adapter.LORA_ALPHA, alpha)
    _write_fields(writer, about)
    made = []
    for path, low in updates.items():
        if low.m is not None or is_embedding(path):
            what = "DoRA" if low.m is not None else f"updates of embeddings, as {path} has"
            raise InputError(f"gguf=adapter: llama.cpp's adapters have no {what}. Merge it: gguf=model")
        name = names.of(f"{path}.weight")
        a, b = _halves(f"{path}.weight", low, low.scale * low.rank / alpha, names.family, names.config)
        made += [_announced(writer, f"{name}.lora_{half}", array.shape, "F32", lambda array=array: array)
                 for half, array in (("a", a), ("b", b))]  # fmt: skip
    _write_all(writer, made)


def _halves(
    name: str, low: LowRank, factor: float, family: Family, config: Config
) -> tuple[np.ndarray, np.ndarray]:
    a, b = np.array(low.a.astype(mx.float32)), np.array(low.b.astype(mx.float32)) * np.float32(factor)
    if low.a.ndim == 2:
        a, b = a.T, b.T
    return np.ascontiguousarray(a), np.ascontiguousarray(to_gguf(name, b, family, config))


def read_model(file: Path, config: Config, names: Iterable[str]) -> Iterator[tuple[str, mx.array]]:
    """Yields (name in mlx-lm, weight in float32) of a model's file, for each of `names`.

    Raises: KeyError for one that the file does not have.
    """
    known = Names(config)
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(file).tensors}
    for name in names:
        tensor = tensors[known.of(name)]
        weight = gguf.dequantize(tensor.data, tensor.tensor_type)
        yield name, mx.array(from_gguf(name, weight, known.family, known.config))


def read_adapter(file: Path, config: Config, paths: Iterable[str]) -> dict[str, LowRank]:
    """Returns the updates in an adapter's file, for the layers at `paths`. Raises: KeyError."""
    known = Names(config)
    reader = gguf.GGUFReader(file)
    alpha = float(reader.fields[gguf.Keys.Adapter.LORA_ALPHA].contents())
    tensors = {tensor.name: tensor.data for tensor in reader.tensors}
    updates = {}
    for path in paths:
        name = f"{path}.weight"
        a, b = (tensors[f"{known.of(name)}.lora_{half}"] for half in "ab")
        b = from_gguf(name, b, known.family, known.config)
        a, b = (a.T, b.T) if a.ndim == 2 else (a, b)
        rank = a.shape[1]
        updates[path] = LowRank(mx.array(a), mx.array(b), alpha / rank)
    return updates


def _write_fields(writer: gguf.GGUFWriter, fields: Mapping[str, Any]) -> None:
    for name, value in fields.items():
        if isinstance(value, bool):
            writer.add_bool(name, value)
        elif isinstance(value, int):
            writer.add_uint32(name, value)
        elif isinstance(value, float):
            writer.add_float32(name, value)
        elif isinstance(value, str):
            writer.add_string(name, value)
        elif value:
            writer.add_array(name, value)


def _announced(
    writer: gguf.GGUFWriter, name: str, shape: tuple[int, ...], kind: str, values: Callable[[], np.ndarray]
) -> Callable[[], np.ndarray]:
    """Announces a tensor to the writer and returns what makes it, packed as `kind`."""
    of_type = gguf.GGMLQuantizationType[kind]
    packed = gguf.quant_shape_to_byte_shape(shape, of_type)
    writer.add_tensor_info(name, packed, np.dtype(np.uint8), int(np.prod(packed)), of_type)

    def made() -> np.ndarray:
        return np.ascontiguousarray(gguf.quants.quantize(values(), of_type)).view(np.uint8)

    return made


def _write_all(writer: gguf.GGUFWriter, made: Iterable[Callable[[], np.ndarray]]) -> None:
    """Writes header, fields and tensors, one of which is in memory at a time."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for tensor in made:
        writer.write_tensor_data(tensor())
    writer.close()
