"""`mlxft serve`, `chat` and `generate --compare` as commands: what they refuse, print and say."""

import json
import socket
import subprocess

import pytest

from tests.command import mlxft

QUIET = ("temperature=0", "max_tokens=8")


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["adapter.init_from=runs/none/adapter"], "no adapter folder runs/none/adapter"),
        (["server.adapters={x:nowhere}"], "no adapter folder nowhere"),
        (["server.adapters={a/b:nowhere}"], "no name"),
        (["server.prt=9000"], "did you mean server.port?"),
        (["server.port=70000"], "at most 65535"),
        (["trainer.max_steps=3"], "mlxft serve does not use it"),
        (["--provider", "qi"], "there is pi"),
    ],
)
def test_what_is_wrong_ends_serve_before_it_listens(folder, tmp_path, overrides, said):
    done = mlxft("serve", f"model.path={folder}", *overrides, folder=tmp_path)
    assert done.returncode == 2 and said in done.stderr and "Traceback" not in done.stderr


def test_a_port_that_is_taken_is_said(folder):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = mlxft("serve", f"model.path={folder}", f"server.port={port}")
    assert done.returncode == 2 and f"server.port={port}" in done.stderr


def test_an_adapter_of_another_template_is_refused_unless_told(folder, adapters, tmp_path):
    adapter = tmp_path / "other"
    subprocess.run(["cp", "-r", str(adapters["a"]), str(adapter)], check=True)
    (adapter / "chat_template.jinja").write_text("{{ messages }}")
    chat = ("chat", f"model.path={folder}", f"adapter.init_from={adapter}", *QUIET)
    done = mlxft(*chat, input="hi\n", stdin=None)
    assert done.returncode == 2 and "another chat template" in done.stderr
    assert mlxft(*chat, "any_template=true", input="hi\n", stdin=None).returncode == 0


def test_pi_is_told_of_the_server(folder):
    done = mlxft("serve", "--provider", "pi", f"model.path={folder}", "server.port=9000")
    provider = json.loads(done.stdout)["providers"]["mlxft"]
    assert provider["baseUrl"] == "http://127.0.0.1:9000/v1" and provider["api"] == "openai-completions"
    (model,) = provider["models"]
    assert (model["id"], model["input"], model["reasoning"]) == ("local", ["text"], False)
    assert (model["contextWindow"], model["maxTokens"]) == (512, 512)  # the tiny model's positions
    assert model["compat"] == {"supportsDeveloperRole": False, "supportsStore": False}


def test_a_conversation_changes_its_adapter(folder, adapters):
    lines = "hi\n/adapter a\nhi\n/reset\nhi\n/adaptr\n/adapter zz\n/adapter none\n/reset\nhi\n/quit\nhi\n"
    done = mlxft("chat", f"model.path={folder}", f"adapters={{a:{adapters['a']}}}", *QUIET, input=lines)
    said = done.stdout.splitlines()
    base, adapted = (
        mlxft("generate", f"model.path={folder}", "prompt=hi", "max_tokens=8", *more).stdout.strip()
        for more in ([], [f"adapter.init_from={adapters['a']}"])
    )
    assert base != adapted
    assert (said[0], said[1], said[4], said[-1]) == (base, "a answers", adapted, base)
    assert "did you mean /adapter?" in said[5] and "mounted: a" in said[6]


def test_generate_compares_the_base_with_the_adapter(folder, adapters):
    usual = ("generate", f"model.path={folder}", "prompt=hi", "max_tokens=8")
    base = mlxft(*usual).stdout.strip()
    adapted = mlxft(*usual, f"adapter.init_from={adapters['a']}").stdout.strip()
    done = mlxft(*usual, f"adapter.init_from={adapters['a']}", "--compare")
    assert done.stdout == f"base: {base}\n\nadapter: {adapted}\n"
    refused = mlxft(*usual, "--compare")
    assert refused.returncode == 2 and "adapter.init_from" in refused.stderr
