"""A model as `eval` and `generate` use it: loaded, with the adapter of `adapter.init_from` applied."""

from typing import Any, Optional

import mlx.nn as nn

from mlxft.config.schema import Config
from mlxft.models.adapters import load_adapter
from mlxft.models.load import load


def load_adapted(config: Config, tokenizer_required: bool = True) -> tuple[nn.Module, Optional[Any]]:
    """Returns the model that `model` names, with the adapter applied where one is given, and its tokenizer.

    Raises: InputError naming the file, tensor or key that is wrong.
    """
    model, tokenizer = load(config.model.path, config.model.revision, config.model.dtype, tokenizer_required)
    if config.adapter.init_from is not None:
        load_adapter(model, config.adapter.init_from)
    return model, tokenizer
