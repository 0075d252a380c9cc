"""Exports uploaded to the hub, by a server that stands in for it."""

import pytest

from tests.command import environment, mlxft
from tests.export.made import adapter
from tests.hub import TOKEN, Uploads, stand_in
from tests.tiny_models import make_model


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    root = tmp_path_factory.mktemp("trained")
    return adapter(make_model(root / "base", "llama", num_hidden_layers=2), root / "adapter")


def export(trained, folder, address, *more, token=TOKEN):
    """The command's result. Large files go by plain HTTP: the other way needs the hub's own storage."""
    env = environment(HF_ENDPOINT=address, HF_HOME=str(folder / "cache"), HF_HUB_DISABLE_XET="1")
    env.pop("HF_TOKEN", None)
    env |= {"HF_TOKEN": token} if token else {}
    given = (f"adapter.init_from={trained}", "to=peft", f"out={folder / 'out'}", "hub=user/name")
    return mlxft("export", *given, *more, env=env)


def test_an_export_is_uploaded_as_it_lies_on_the_disk(trained, tmp_path):
    uploads = Uploads()
    with stand_in(tmp_path, "models", uploads) as (address, _):
        done = export(trained, tmp_path, address, "hub_private=true")
    assert done.returncode == 0, done.stderr
    assert f"hub: {address}/user/name/commit/" in done.stdout
    assert uploads.files == {file.name: file.read_bytes() for file in (tmp_path / "out").iterdir()}
    assert set(uploads.files) > {"README.md", "adapter_model.safetensors"} and len(uploads.large) == 1
    [made] = uploads.made
    assert (made["organization"], made["name"]) == ("user", "name")
    assert made.get("private") or made.get("visibility") == "private"  # as the client's version has it


def test_whether_a_repository_is_private_is_the_accounts_choice_unless_it_is_said(trained, tmp_path):
    uploads = Uploads()
    with stand_in(tmp_path, "models", uploads) as (address, _):
        assert export(trained, tmp_path, address).returncode == 0
    assert not {"private", "visibility"} & set(uploads.made[0])


@pytest.mark.parametrize("token, message", [
    (None, "nobody is logged in to the hub; hf auth login does it"),
    ("hf_wrong", "the hub refuses the login"),
])  # fmt: skip
def test_without_a_login_nothing_is_exported(trained, tmp_path, token, message):
    with stand_in(tmp_path, "models", Uploads()) as (address, _):
        done = export(trained, tmp_path, address, token=token)
    assert done.returncode == 2 and f"hub=user/name: {message}" in done.stderr
    assert not (tmp_path / "out").exists()


def test_an_upload_that_fails_leaves_the_export_and_says_how_to_go_on(trained, tmp_path):
    uploads = Uploads()
    uploads.refuses = True
    with stand_in(tmp_path, "models", uploads) as (address, _):
        done = export(trained, tmp_path, address)
    assert done.returncode == 3, done.stderr
    assert "the upload failed" in done.stderr and f"hf upload user/name {tmp_path / 'out'}" in done.stderr
    assert "Traceback" not in done.stderr
    assert (tmp_path / "out" / "adapter_model.safetensors").is_file()
