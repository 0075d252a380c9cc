"""The forms that an adapter is exported in, each from the trained model to a folder and back."""

from pathlib import Path
from typing import Any

import mlx.nn as nn

from mlxft.config.schema import Config, ExportConfig
from mlxft.export.merged import MergedModel
from mlxft.export.merging import changes_of
from mlxft.models.adapters import load_adapter, read_adapter, save_peft_adapter, start_of
from mlxft.models.load import load_model, stored_model
from mlxft.models.lora_linear import AdaptedLayer


class Form:
    """What all forms share. base: the model's folder. out: the folder that is written into.

    trained: what was trained, in a line. file: the one that matters to whoever loads it. remedy: what to do
    where the exported logits are too far from the trained ones.
    """

    name = ""
    file = ""
    remedy = "This is a fault of mlxft; please report it."

    def __init__(self, config: Config, wanted: ExportConfig, base: Path, out: Path, tokenizer: Any):
        self.config = config
        self.wanted = wanted
        self.base = base
        self.out = out
        self.tokenizer = tokenizer
        self.trained = ""

    def begin(self, model: nn.Module) -> None:
        """Takes what the form needs from the trained model while it is there."""
        self.trained = _described(model)

    def write(self) -> None:
        """Writes into `out`. Raises: InputError for what the form has no word for."""

    def load_back(self) -> nn.Module:
        """Returns a model that computes what lies in `out`."""
        raise NotImplementedError

    def lines(self) -> list[tuple[str, str]]:
        """Returns what is to be said of it, as (name, value)."""
        return []

    def record(self) -> dict[str, Any]:
        """Returns what the manifest says of it."""
        return {}


class Peft(Form):
    """PEFT's layout: adapter_config.json and adapter_model.safetensors."""

    name = "peft"
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

    def merged(self, wanted: ExportConfig) -> MergedModel:
        """Returns what is to be written, nothing of it computed yet."""
        stored, _ = stored_model(self.base)
        adapter = self.config.adapter
        if len(adapter.starts) == 1 and (read := read_adapter(adapter.starts[0])).kind == "full":
            return MergedModel(self.base, stored, changes_of(read), wanted)
        fitted = start_of(stored, adapter.init_from, adapter.init_weights)
        return MergedModel(self.base, stored, changes_of(fitted), wanted)

    def write(self) -> None:
        self.report = self.merged(self.wanted).write(self.out)

    def load_back(self) -> nn.Module:
        return load_model(self.out, self.config.model.dtype)

    @property
    def remedy(self) -> str:
        if self.wanted.quantization == "same" and self.report.packed:
            return "quantization=mixed keeps the changed layers dense"
        return "dtype=float32 rounds nothing" if self.wanted.dtype != "float32" else Form.remedy

    def lines(self) -> list[tuple[str, str]]:
        return self.report.lines()

    def record(self) -> dict[str, Any]:
        rounding = {each.layer: round(each.error, 6) for each in self.report.roundings}
        return {"quantization": self.wanted.quantization, "dtype": self.wanted.dtype, "rounding": rounding}


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


class Gguf(Merged):
    name = "gguf"


class GgufAdapter(Form):
    name = "gguf adapter"
