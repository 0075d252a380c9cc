import pytest

from tests.evaluation.made import make_adapter, make_speaker


@pytest.fixture(scope="package")
def folder(tmp_path_factory):
    return make_speaker(tmp_path_factory.mktemp("speaker"))


@pytest.fixture(scope="package")
def adapters(folder, tmp_path_factory):
    """Two adapters of the model, by name."""
    return {name: make_adapter(tmp_path_factory.mktemp(name), folder, seed) for seed, name in enumerate("ab")}
