"""Tiny models of each family with adapters that have moved."""

import pytest

from mlxft.config.schema import AdapterConfig
from mlxft.models.decoder import view
from mlxft.models.load import load
from mlxft.models.lora import apply_adapter
from tests.gradients import fill_adapters
from tests.tiny_models import FAMILIES, make_model


@pytest.fixture(scope="module", params=FAMILIES)
def made(request, tmp_path_factory):
    """A decoder view of a tiny model with non-zero adapters; Gemma's windows of 8 are below the rows."""
    folder = make_model(tmp_path_factory.mktemp("model"), request.param)
    model, _ = load(str(folder), dtype="float32")
    made = view(model)
    apply_adapter(model, AdapterConfig(rank=4, dropout=0.3), seed=1)
    fill_adapters(model)
    return made
