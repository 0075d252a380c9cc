"""The documentation does what it says: every command and snippet runs, every name in it exists."""

import os
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from mlxft import cli
from mlxft.config import Config, compose
from mlxft.config.composition import COMMANDS
from mlxft.config.keys import groups_of, keys_of
from mlxft.sweeps.grid import product, take_apart
from tests.docs.pages import PAGES, ROOT, Block, blocks_of, code_spans, commands_of
from tests.tiny_models import make_model

MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"  # a folder of that name is taken before the hub
ROWS = [("Where is the key?", "Under the mat."), ("Who waters the plants?", "Mara."), ("And you?", "No.")]
SCHEMAS = [Config, *(command.own for command in COMMANDS.values() if command.own)]
KEYS = keys_of(*SCHEMAS)

# The same words elsewhere than in a configuration: a file's name, the layers' paths in a model.
NO_KEYS = {"model.safetensors", "model.layers", "model.gguf", "adapter.gguf"}


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory):
    """Stands in for SmolLM2: as many blocks as the recipes adapt, and a few kilobytes."""
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 16}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    return make_model(tmp_path_factory.mktemp("model") / "tiny", "llama", **shape, **heads)


@pytest.fixture
def folder(tiny_model, tmp_path, monkeypatch):
    """A reader's folder: the model where the pages name it, and the files that stand for their own."""
    for name in (MODEL, "my-model"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).symlink_to(tiny_model)
    row = '{{"messages": [{{"role": "user", "content": "{}"}}, {{"role": "assistant", "content": "{}"}}]}}\n'
    for name in ("rows.jsonl", "valid.jsonl"):
        (tmp_path / name).write_text("".join(row.format(*pair) for pair in ROWS))
    script = tmp_path / "bin" / "mlxft"
    script.parent.mkdir()
    script.write_text(f'#!/bin/sh\nPYTHONPATH="{ROOT}" exec "{sys.executable}" -m mlxft "$@"\n')
    script.chmod(0o755)
    monkeypatch.setenv("PATH", str(script.parent), prepend=os.pathsep)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))  # of reference log-probabilities
    monkeypatch.setenv("COLUMNS", "80")  # of tables
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_what_a_page_says_to_do_does_what_it_says(page, folder, capsys):
    namespace: dict = {"__name__": "page"}
    output, ran = "", None
    for block in blocks_of(page):
        if "file" in block.marks:
            target = folder / block.marks["file"]
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(block.body, encoding="utf-8")
        elif block.runs:
            output, ran = run(block, namespace, capsys), block
        elif block.language == "text" and ran is not None:
            assert_shown(block, ran, output)
        else:
            ran = None  # the text below it, if there is one, is of something that was not run


def run(block: Block, namespace: dict, capsys) -> str:
    """Returns what the block prints, on standard output and standard error."""
    capsys.readouterr()
    if block.language == "python":
        exec(compile(block.body, block.where, "exec"), namespace)
        return "".join(capsys.readouterr())
    printed = ""
    for command in block.commands():
        code, more = run_command(command, capsys)
        assert code == int(block.marks.get("exits", 0)), f"{block.where}: {command}: exit {code}\n{more}"
        printed += more
    return printed


def run_command(command: str, capsys) -> tuple[int, str]:
    """Runs mlxft in this process, which is quicker, and everything else in a shell."""
    command, _, saved_as = command.partition(" > ")
    words = shlex.split(command)
    if words[0] == "mlxft":
        code = cli.main(words[1:])
        output, messages = capsys.readouterr()
        if saved_as:
            Path(saved_as).write_text(output)
        return code, output + messages
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=120)
    return done.returncode, done.stdout + done.stderr


def assert_shown(shown: Block, ran: Block, output: str) -> None:
    def comparable(text: str) -> str:
        numbers = re.sub(r"[+-]?\d[\d,.]*", "0", text)  # and the small model's sizes are in MB, not GB
        return re.sub(r"0 [GMk]B", "0 GB", numbers) if ran.language == "bash" else text

    for line in shown.body.splitlines():
        assert comparable(line.strip()) in comparable(output), f"{shown.where}: not printed: {line}\n{output}"


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_commands_that_are_not_run_are_such_as_exist(page, folder):
    """They need a download, a GPU or the checkout: their keys, files, extras and targets are looked up."""
    for block, command in commands_of(page):
        if not block.runs:
            check_unrun(shlex.split(command))


def check_unrun(words: list[str]) -> None:
    program, *rest = words
    if Path(program).name == "mlxft" and rest[:2] == ["train", "-m"]:
        runs = [word for word in rest[2:] if not word.startswith("sweep.")]
        compose([word for word in rest[2:] if word.startswith("sweep.")], command="sweep")
        for job in product(*take_apart(runs)):
            compose(list(job.arguments))
    elif Path(program).name == "mlxft" and rest[0] in COMMANDS:
        compose(rest[1:], command=rest[0])
    elif Path(program).name == "mlxft":
        assert rest[0] in cli.COMMANDS
    elif program == "make":
        targets = re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        assert rest[0] in targets
    elif program == "pip":
        extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
        assert set(re.findall(r"\[(\w+)\]", rest[-1])) <= set(extras)
    else:
        assert program in ("source", "python", ".venv/bin/python"), words
        files = [word for word in rest if word.endswith(".py")]
        assert all((ROOT / file).is_file() for file in files), words


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_keys_that_are_named_exist(page):
    groups = "|".join(groups_of(KEYS))
    named = re.compile(rf"(?<![\w./-])(?:{groups})\.[a-z_]+")
    texts = code_spans(page) + [block.body for block in blocks_of(page) if block.language in ("bash", "yaml")]
    mistyped = {"data.trian"} if page.name == "configuration.md" else set()
    unknown = {name for text in texts for name in named.findall(text)} - set(KEYS) - NO_KEYS - mistyped
    assert not unknown


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_and_files_that_are_named_exist(page):
    text = page.read_text(encoding="utf-8")
    for link in re.findall(r"\]\(([^)]+)\)", text):
        if link.startswith("https://"):
            continue
        path, _, heading = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        assert not heading or heading in headings(target), link
    for span in code_spans(page):
        if re.fullmatch(r"(mlxft|tests|configs|benchmarks)/[\w./-]+", span) and "NAME" not in span:
            assert (ROOT / span).exists(), span


def headings(page: Path) -> set[str]:
    """Returns the names by which a page's headings are linked."""
    titles = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


def test_files_of_groups_that_are_named_exist():
    rows = re.findall(
        r"^\| `(\w+)` \| (`.+?`) \|", (ROOT / "docs/configuration.md").read_text(), re.MULTILINE
    )
    assert {group for group, _ in rows} >= {"model", "adapter", "optimizer", "schedule", "trainer", "head"}
    for group, files in rows:
        for file in re.findall(r"`(\w+)`", files):
            assert (ROOT / "configs" / group / f"{file}.yaml").is_file(), f"{group}={file}"


def test_every_command_is_mentioned():
    text = "\n".join(page.read_text(encoding="utf-8") for page in PAGES)
    assert not [name for name in cli.COMMANDS if f"mlxft {name}" not in text]


def test_every_page_is_linked_from_the_readme():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert not [page.name for page in PAGES[1:] if f"(docs/{page.name})" not in text]
