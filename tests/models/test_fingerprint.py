"""A fingerprint of weights: what changes it and what does not."""

import json
import os
import shutil

import pytest

from mlxft.errors import InputError
from mlxft.models.fingerprint import fingerprint
from tests.tiny_models import make_model


@pytest.fixture
def folder(tmp_path):
    return make_model(tmp_path / "model", "llama")


def test_a_copy_and_a_link_have_the_same_whenever_they_were_made(folder, tmp_path):
    before = fingerprint(folder)
    assert list(before) == ["model.safetensors"]
    copy = shutil.copytree(folder, tmp_path / "copy")
    os.utime(copy / "model.safetensors", (1, 1))
    (tmp_path / "linked").symlink_to(folder)
    (folder / "README.md").write_text("not a weight")
    assert fingerprint(copy) == fingerprint(tmp_path / "linked") == fingerprint(folder) == before


def test_each_tensor_has_a_say(folder):
    """The file keeps its size and its header; one tensor's bits are turned round."""
    file = folder / "model.safetensors"
    content = file.read_bytes()
    begin = 8 + int.from_bytes(content[:8], "little")
    tensors = [tensor for name, tensor in json.loads(content[8:begin]).items() if name != "__metadata__"]
    found = {fingerprint(folder)[file.name]}
    for first, last in (tensor["data_offsets"] for tensor in tensors):
        changed = bytearray(content)
        changed[begin + first : begin + last] = bytes(255 - b for b in content[begin + first : begin + last])
        file.write_bytes(changed)
        found.add(fingerprint(folder)[file.name])
    assert len(found) == 1 + len(tensors) > 20


def test_shapes_and_the_names_of_files_have_a_say(folder):
    file = folder / "model.safetensors"
    [before] = fingerprint(folder).values()
    content = file.read_bytes()
    file.write_bytes(content.replace(b"[64,", b"[46,", 1))
    [reshaped] = fingerprint(folder).values()
    assert reshaped != before
    file.write_bytes(content)
    file.rename(folder / "model-00001.safetensors")
    assert fingerprint(folder) == {"model-00001.safetensors": before}


def test_a_file_that_was_cut_short_is_refused(folder):
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(InputError, match="model.safetensors was cut short"):
        fingerprint(folder)
