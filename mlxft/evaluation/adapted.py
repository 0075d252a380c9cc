"""A model as `eval` and `generate` use it: loaded, with the adapter of `adapter.init_from` applied."""

from pathlib import Path

import mlx.nn as nn

from mlxft.config.schema import Config
from mlxft.models.adapters import load_adapter
from mlxft.models.load import load_model


def load_adapted(config: Config, folder: Path) -> nn.Module:
    """Returns the model in `folder` in the type that `model.dtype` says, adapted where an adapter is given.

    Raises: InputError naming the file, tensor or key that is wrong.
    """
    model, _ = load_model(folder, config.model.dtype)
    if config.adapter.init_from is not None:
        load_adapter(model, config.adapter.init_from)
    return model
