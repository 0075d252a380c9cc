"""A model as `eval` and `generate` use it: loaded, with the adapters of `adapter.init_from` applied."""

from collections.abc import Sequence
from pathlib import Path

import mlx.nn as nn

from mlxft.config.schema import Config
from mlxft.models.adapters import load_adapter, settle
from mlxft.models.decoder import DecoderView, view
from mlxft.models.load import load_model
from mlxft.models.lora_linear import AdaptedLayer
from mlxft.models.manifest import check_base
from mlxft.models.new_tokens import NewToken, new_tokens_of
from mlxft.training.objectives.common import Reference
from mlxft.training.reference import adapter_off, another_model


def load_adapted(config: Config, folder: Path, new: Sequence[NewToken] = ()) -> nn.Module:
    """Returns the model in `folder` in the type that `model.dtype` says, adapted where an adapter is given.

    new: tokens that it is given. Raises: InputError naming the file, tensor or key that is wrong.
    """
    model = load_model(folder, config.model.dtype, new)
    if config.adapter.init_from is not None:
        if not config.adapter.any_base:
            check_base(config.adapter.starts, folder)
        load_adapter(model, config.adapter.init_from, weights=config.adapter.init_weights)
        settle(model)
    return model


def base_of(adapted: DecoderView, config: Config, folder: Path) -> Reference:
    """Returns the model before its adapter: LoRA off, or `folder` read anew where all weights came."""
    if any(isinstance(module, AdaptedLayer) for module in adapted.model.modules()):
        return adapter_off
    return another_model(view(load_model(folder, config.model.dtype, new_tokens_of(adapted.model))))
