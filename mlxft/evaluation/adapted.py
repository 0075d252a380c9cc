"""A model as `eval` and `generate` use it: loaded, with the adapters of `adapter.init_from` applied."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import mlx.nn as nn

from mlxft.config.schema import Config
from mlxft.models.adapters import load_adapter, settle
from mlxft.models.decoder import DecoderView, view
from mlxft.models.load import load_model
from mlxft.models.lora_linear import AdaptedLayer, adapter_disabled
from mlxft.models.manifest import check_base


def load_adapted(config: Config, folder: Path) -> nn.Module:
    """Returns the model in `folder` in the type that `model.dtype` says, adapted where an adapter is given.

    Raises: InputError naming the file, tensor or key that is wrong.
    """
    model = load_model(folder, config.model.dtype)
    if config.adapter.init_from is not None:
        if not config.adapter.any_base:
            check_base(config.adapter.starts, folder)
        load_adapter(model, config.adapter.init_from, weights=config.adapter.init_weights)
        settle(model)
    return model


@contextmanager
def without_adapter(adapted: DecoderView, config: Config, folder: Path) -> Iterator[DecoderView]:
    """Gives the model before its adapter: LoRA switched off, or `folder` read anew where all weights came."""
    if any(isinstance(module, AdaptedLayer) for module in adapted.model.modules()):
        with adapter_disabled(adapted.model):
            yield adapted
    else:
        yield view(load_model(folder, config.model.dtype))
