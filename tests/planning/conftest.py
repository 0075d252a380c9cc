"""A model whose layers outweigh its head, and calibrations kept where no other test sees them."""

import pytest

from mlxft.layouts import attention
from tests.runs import write_token_rows
from tests.tiny_models import make_model

# Layers that take more than a probe's rounding, small enough for a step in a second.
SHAPE = {"hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 8}


@pytest.fixture(autouse=True, scope="module")
def cache(tmp_path_factory):
    """The folder of calibrations."""
    folder = tmp_path_factory.getbasetemp() / "cache"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder))
        yield folder


@pytest.fixture(autouse=True, scope="module")
def small_blocks():
    """Attention in blocks from 91 positions on with four heads: what long rows do, in short ones."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(attention._SCORES_BYTES, "cpu", 2**17)
        yield


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    """The folder of a qwen3 of eight layers."""
    return make_model(tmp_path_factory.mktemp("model") / "model", "qwen3", **SHAPE)


@pytest.fixture(scope="session")
def windowed(tmp_path_factory):
    """The folder of a gemma3 of six layers, three of which see 8 positions only."""
    return make_model(tmp_path_factory.mktemp("model") / "model", "gemma3_text", num_hidden_layers=6)


@pytest.fixture(scope="session")
def windowed_wide(tmp_path_factory):
    """The same, of which they see 64."""
    folder = tmp_path_factory.mktemp("model") / "model"
    return make_model(folder, "gemma3_text", num_hidden_layers=6, sliding_window=64)


@pytest.fixture(scope="session")
def not_probed(tmp_path_factory):
    """The folder of a model that no layer of is tried, for tests that only count rows."""
    return make_model(tmp_path_factory.mktemp("model") / "model", "gemma2")


@pytest.fixture(scope="session")
def data(tmp_path_factory):
    """Two rows of 161 tokens, that is 160 positions; half of each is trained on."""
    return write_token_rows(tmp_path_factory.mktemp("rows") / "rows.jsonl", [161] * 2)
