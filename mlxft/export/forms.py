"""The forms that an adapter is exported in, each from the trained model to a folder and back."""

import math
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_unflatten

from mlxft.config.schema import Config, ExportConfig
from mlxft.errors import InputError
from mlxft.export.folder import check_space
from mlxft.export.gguf_files import TYPES, read_model, write_adapter, write_model
from mlxft.export.gguf_files import read_adapter as read_adapter_file
from mlxft.export.gguf_tokenizer import vocabulary
from mlxft.export.merged import MergedModel
from mlxft.export.merging import Changes, changes_of, in_tables, merged_weights
from mlxft.models import audit
from mlxft.models.adapters import attach, load_adapter, read_adapter, save_peft_adapter, start_of, updates_of
from mlxft.models.dequantise import dense, is_quantised
from mlxft.models.fitting import Fitted
from mlxft.models.gguf_families import family_of, settings_of, text_config
from mlxft.models.load import load_model, stored_model
from mlxft.models.lora_linear import AdaptedLayer
from mlxft.models.new_tokens import Vocabulary, add_new_tokens
from mlxft.models.targets import adaptable_layers
from mlxft.models.whole_modules import type_of, whole_paths

_MORE_DIGITS = "dtype=float32 rounds nothing"


class Form(ABC):
    """What all forms share. base: the model's folder. out: the folder that is written into.

    trained: what was trained, in a line. file: the one that matters to whoever loads it. remedy: what to do
    where the exported logits are too far from the trained ones. dtype: that the trained model computes in.
    """

    name = ""
    library = "gguf"
    file = ""
    rounds = True  # False for a form that holds what was trained as it is
    remedy = "This is a fault of mlxft; please report it."

    def __init__(self, config: Config, wanted: ExportConfig, base: Path, out: Path, words: Vocabulary):
        self.config = config
        self.wanted = wanted
        self.base = base
        self.out = out
        self.tokenizer = words.tokenizer
        self.words = words
        self.trained = ""
        self.dtype = mx.float32

    def begin(self, model: nn.Module) -> None:
        """Takes what the form needs from the trained model while it is there."""
        self.trained = _described(model)
        self.dtype = type_of(model)

    def write(self) -> None:
        """Writes into `out`. Raises: InputError for what the form has no word for."""
        return  # some are written when they begin, from the model itself

    def changes(self, stored: nn.Module) -> Changes:
        """Returns what the adapters change of the model `stored`."""
        adapter = self.config.adapter
        if len(adapter.starts) == 1 and (read := read_adapter(adapter.starts[0])).kind == "full":
            return changes_of(read)
        if self.words.new:
            stored, _ = stored_model(self.base)  # one more, since its tables are not those of the files
            add_new_tokens(stored, self.words.new)
        return in_tables(changes_of(start_of(stored, adapter.init_from, adapter.init_weights)), stored)

    @abstractmethod
    def load_back(self) -> nn.Module:
        """Returns a model that computes what lies in `out`."""

    def lines(self) -> list[tuple[str, str]]:
        """Returns what is to be said of it, as (name, value)."""
        return []

    def record(self) -> dict[str, Any]:
        """Returns what the manifest says of it."""
        return {}


class Peft(Form):
    """PEFT's layout: adapter_config.json and adapter_model.safetensors."""

    name = "peft"
    library = "peft"
    rounds = False
    file = "adapter_model.safetensors"

    def begin(self, model: nn.Module) -> None:
        super().begin(model)
        save_peft_adapter(self.out, model, self.config.model.path)

    def load_back(self) -> nn.Module:
        model = load_model(self.base, self.config.model.dtype)
        load_adapter(model, self.out)
        return model


class Merged(Form):
    """A model folder with the adapter in its weights."""

    name = "merged"
    file = "model.safetensors"

    def write(self) -> None:
        stored, config = stored_model(self.base)
        size = self.words.size if self.words.new else None
        merged = MergedModel(self.base, stored, config, self.changes(stored), self.wanted, size)
        self.report = merged.write(self.out)
        if self.words.new:
            self.tokenizer.save_pretrained(self.out)

    def load_back(self) -> nn.Module:
        return load_model(self.out, self.config.model.dtype)

    @property
    def library(self) -> str:
        """What loads it: transformers where nothing is quantised in MLX's way."""
        return "mlx" if "quantization" in audit.read_json(self.out / "config.json") else "transformers"

    @property
    def remedy(self) -> str:
        if self.wanted.quantization == "same" and self.report.packed:
            return "quantization=mixed keeps the changed layers dense"
        return _MORE_DIGITS if self.wanted.dtype != "float32" else Form.remedy

    def lines(self) -> list[tuple[str, str]]:
        return self.report.lines()

    def record(self) -> dict[str, Any]:
        rounding = {each.layer: round(each.error, 6) for each in self.report.roundings}
        return {"quantization": self.wanted.quantization, "dtype": self.wanted.dtype, "rounding": rounding}


class Gguf(Form):
    """A GGUF file of the model with the adapter in its weights, and its tokenizer."""

    name = "gguf"
    file = "model.gguf"

    def begin(self, model: nn.Module) -> None:
        super().begin(model)
        self.model_config = audit.read_json(self.base / "config.json")
        text = text_config(self.model_config)
        settings_of(text, family_of(self.model_config))  # what cannot be written is told before anything is
        tokens = vocabulary(self.base, self.tokenizer, text["vocab_size"])
        template = tokens.pop("chat_template", None)
        self.about = {"general.name": self.config.model.path.rstrip("/").rpartition("/")[2]}
        self.about |= {f"tokenizer.ggml.{key}": value for key, value in tokens.items()}
        self.about |= {} if template is None else {"tokenizer.chat_template": template}

    def write(self) -> None:
        stored, _ = stored_model(self.base)
        weights = list(merged_weights(stored, self.changes(stored)))
        dtype = (
            str(type_of(stored)).removeprefix("mlx.core.")
            if self.wanted.dtype == "auto"
            else self.wanted.dtype
        )
        self.kind = TYPES[dtype]
        check_space(self.out, sum(math.prod(weight.shape) for weight in weights) * getattr(mx, dtype).size)
        write_model(self.out / self.file, self.model_config, weights, self.kind, self.about)

    def load_back(self) -> nn.Module:
        model = load_model(self.base, "float32")
        packed = [(path, module) for path, module in model.named_modules() if is_quantised(module)]
        model.update_modules(tree_unflatten([(path, dense(module, mx.float32)) for path, module in packed]))
        names = [name for name, _ in tree_flatten(model.parameters())]
        model.update(tree_unflatten(list(read_model(self.out / self.file, self.model_config, names))))
        return model

    @property
    def remedy(self) -> str:
        return _MORE_DIGITS if self.wanted.dtype != "float32" else Form.remedy

    def lines(self) -> list[tuple[str, str]]:
        return [("file", f"{self.file}, {self.kind}")]


class GgufAdapter(Form):
    """A GGUF file of the updates alone, for a base that is a GGUF file too."""

    name = "gguf adapter"
    rounds = False
    file = "adapter.gguf"

    def begin(self, model: nn.Module) -> None:
        super().begin(model)
        if whole := whole_paths(model):
            raise InputError(
                f"gguf=adapter: llama.cpp's adapters have no whole modules, and this one has {whole[0]}. "
                "Merge it: gguf=model"
            )
        self.model_config = audit.read_json(self.base / "config.json")
        self.updates = {path: low.trimmed() for path, low in updates_of(model).items()}
        about = {"general.name": self.config.model.path.rstrip("/").rpartition("/")[2] + " adapter"}
        write_adapter(self.out / self.file, self.model_config, self.updates, about)

    def load_back(self) -> nn.Module:
        model = load_model(self.base, self.config.model.dtype)
        found = read_adapter_file(self.out / self.file, self.model_config, self.updates)
        layers = {layer.path: layer for layer in adaptable_layers(model)}
        attach(model, Fitted(self.out, "lora", [(layers[path], low) for path, low in found.items()]))
        return model

    def lines(self) -> list[tuple[str, str]]:
        return [("file", f"{self.file}, F32")]


def _described(model: nn.Module) -> str:
    layers = [module for module in model.modules() if isinstance(module, AdaptedLayer)]
    if not layers:
        return "every weight"
    ranks = sorted({layer.rank for layer in layers})
    rank = str(ranks[0]) if len(ranks) == 1 else f"{ranks[0]} to {ranks[-1]}"
    scales = sorted({layer.scale for layer in layers})
    scale = f"{scales[0]:.4g}" if len(scales) == 1 else f"{scales[0]:.4g} to {scales[-1]:.4g}"
    kind = "DoRA" if any("m" in layer for layer in layers) else "LoRA"
    return f"{kind} of rank {rank}, scale {scale} on {len(layers)} layers"
