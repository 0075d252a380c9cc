"""Digests of a model and of an adapter: what changes them and what does not."""

import json
import os
import shutil

import pytest

from mlxft.errors import InputError
from mlxft.models.fingerprint import adapter_digests, weight_digests
from tests.tiny_models import make_model


@pytest.fixture
def folder(tmp_path):
    return make_model(tmp_path / "model", "llama")


def test_a_copy_and_a_link_have_the_same_whenever_they_were_made(folder, tmp_path):
    before = weight_digests(folder)
    assert list(before) == ["config.json", "model.safetensors"]
    copy = shutil.copytree(folder, tmp_path / "copy")
    os.utime(copy / "model.safetensors", (1, 1))
    (tmp_path / "linked").symlink_to(folder)
    (folder / "README.md").write_text("not a weight")
    assert weight_digests(copy) == weight_digests(tmp_path / "linked") == weight_digests(folder) == before


def test_each_tensor_has_a_say(folder):
    """The file keeps its size and its header; one tensor's bits are turned round."""
    file = folder / "model.safetensors"
    content = file.read_bytes()
    begin = 8 + int.from_bytes(content[:8], "little")
    tensors = [tensor for name, tensor in json.loads(content[8:begin]).items() if name != "__metadata__"]
    found = {weight_digests(folder)[file.name]}
    for first, last in (tensor["data_offsets"] for tensor in tensors):
        changed = bytearray(content)
        changed[begin + first : begin + last] = bytes(255 - b for b in content[begin + first : begin + last])
        file.write_bytes(changed)
        found.add(weight_digests(folder)[file.name])
    assert len(found) == 1 + len(tensors) > 20


def test_shapes_and_the_names_of_files_have_a_say(folder):
    file = folder / "model.safetensors"
    config, before = weight_digests(folder).values()
    content = file.read_bytes()
    file.write_bytes(content.replace(b"[64,", b"[46,", 1))
    reshaped = weight_digests(folder)[file.name]
    assert reshaped != before
    file.write_bytes(content)
    file.rename(folder / "model-00001.safetensors")
    assert weight_digests(folder) == {"config.json": config, "model-00001.safetensors": before}


def test_a_file_that_was_cut_short_is_refused(folder):
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(InputError, match="model.safetensors was cut short"):
        weight_digests(folder)


def test_the_configuration_has_a_say_and_how_it_is_written_has_none(folder):
    file = folder / "config.json"
    before, config = weight_digests(folder), json.loads(file.read_text())
    file.write_text(json.dumps(dict(reversed(config.items())), indent=7))
    assert weight_digests(folder) == before
    file.write_text(json.dumps(config | {"rope_theta": 9999.0}))
    after = weight_digests(folder)
    assert [name for name in after if after[name] != before[name]] == ["config.json"]


@pytest.mark.parametrize("weights", ["adapters.safetensors", "adapter_model.safetensors"])
def test_an_adapters_digests_are_of_all_its_bytes_and_of_nothing_beside_it(weights, tmp_path):
    """In mlx-lm's layout and in PEFT's; the last byte counts, an optimiser's state does not."""
    (tmp_path / weights).write_bytes(bytes(10_000))
    (tmp_path / "adapter_config.json").write_text('{"rank": 2}')
    before = adapter_digests(tmp_path)
    assert sorted(before) == sorted([weights, "adapter_config.json"])
    (tmp_path / "optimizer.safetensors").write_bytes(b"1")
    os.utime(tmp_path / weights, (1, 1))
    assert adapter_digests(tmp_path) == before
    (tmp_path / weights).write_bytes(bytes(9_999) + b"1")
    assert adapter_digests(tmp_path)[weights] != before[weights]
    (tmp_path / "adapter_config.json").write_text('{"rank": 4}')
    assert not adapter_digests(tmp_path).items() & before.items()
    assert adapter_digests(tmp_path / "gone") == {}
