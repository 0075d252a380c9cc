"""mlxft as people install it: a wheel in another folder, an editable checkout, and what both carry."""

import os
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def run(command, cwd, **environment):
    return subprocess.run(
        command,
        cwd=cwd,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The wheel, built from the checkout."""
    folder = tmp_path_factory.mktemp("wheel")
    done = run(
        [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder), str(ROOT)],
        folder,
    )
    assert done.returncode == 0, done.stderr
    return next(folder.glob("*.whl"))


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    """A folder with the wheel installed, apart from the checkout."""
    folder = tmp_path_factory.mktemp("installed")
    done = run(
        [
            sys.executable,
            "-m",
            "pip",
            "install",
            "--no-deps",
            "--no-index",
            "--target",
            str(folder),
            str(wheel),
        ],
        folder,
    )
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture
def elsewhere(tmp_path):
    """A user's folder with rows and a recipe of their own."""
    (tmp_path / "rows.jsonl").write_text('{"text": "a"}\n')
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes" / "own.yaml").write_text(
        "# Own.\nmodel: {path: owner/name}\ndata: {train: rows.jsonl}\n"
        "trainer: {objective: sft, max_steps: 7}\n"
    )
    return tmp_path


def test_the_wheel_carries_configs_recipes_and_kernels(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    for top in ("configs", "recipes", "kernels"):
        files = [path.relative_to(ROOT) for path in (ROOT / top).rglob("*") if path.is_file()]
        assert files
        assert {f"mlxft/{path}" for path in files} <= names
    assert not [name for name in names if name.startswith(("tests/", "runs/"))]


@pytest.mark.parametrize("kind", ["wheel", "checkout"])
def test_recipes_are_found_from_another_folder(kind, installed, elsewhere):
    where = installed if kind == "wheel" else ROOT
    command = [sys.executable, "-m", "mlxft"]
    listed = run([*command, "recipes"], elsewhere, PYTHONPATH=str(where))
    assert listed.returncode == 0, listed.stderr
    names = sorted(path.stem for path in (ROOT / "recipes").glob("*.yaml"))
    found = [line.split()[0] for line in listed.stdout.splitlines() if re.match(r"\S", line)]
    assert found[: len(names) + 1] == sorted([*names, "own"])

    for name in [*names, "own"]:
        shown = run([*command, "train", "--config", f"+recipe={name}"], elsewhere, PYTHONPATH=str(where))
        assert shown.returncode == 0, shown.stderr
    assert "max_steps: 7\n" in shown.stdout

    chosen = run(
        [*command, "train", "--config", "+recipe=own", "trainer=checkpoint"],
        elsewhere,
        PYTHONPATH=str(where),
    )
    assert "  gradient: checkpoint\n" in chosen.stdout
    unknown = run([*command, "train", "+recipe=nope_"], elsewhere, PYTHONPATH=str(where))
    assert unknown.returncode == 2
    assert "own" in unknown.stderr


def test_the_wheel_is_used_from_its_own_folder(installed, elsewhere):
    program = "import mlxft.resources as r; print(r.__file__); print(r.folder('configs'))"
    done = run([sys.executable, "-c", program], elsewhere, PYTHONPATH=str(installed))
    assert all(line.startswith(str(installed)) for line in done.stdout.splitlines())


def test_an_editable_installation_uses_the_checkout(tmp_path):
    # --ignore-installed: or pip would remove the mlxft that this interpreter has.
    options = [
        "--ignore-installed",
        "--no-deps",
        "--no-build-isolation",
        "--no-index",
        "--prefix",
        str(tmp_path),
    ]
    done = run([sys.executable, "-m", "pip", "install", *options, "--editable", str(ROOT)], tmp_path)
    assert done.returncode == 0, done.stderr
    site = next(tmp_path.glob("lib/python*/site-packages"))
    program = (
        f"import site; site.addsitedir({str(site)!r}); import mlxft.resources as r; "
        "print(r.__file__); print(r.folder('recipes'))"
    )
    # -S: without this interpreter's own packages, and so without an mlxft that it may have already.
    done = run([sys.executable, "-S", "-c", program], tmp_path)
    assert done.stdout.split() == [str(ROOT / "mlxft" / "resources.py"), str(ROOT / "recipes")], done.stderr
    script = next(tmp_path.glob("bin/mlxft"))
    assert "mlxft.cli" in script.read_text()


def test_the_script_is_the_command(installed):
    entry = next(installed.glob("mlxft-*.dist-info/entry_points.txt")).read_text()
    assert "mlxft = mlxft.cli:main" in entry


def test_the_package_says_what_it_needs():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["requires-python"] == ">=3.11,<3.14"
    assert "hydra-core>=1.3.2,<1.5" in project["dependencies"]
    assert {"cpu", "cuda12", "cuda13", "wandb", "dev"} <= set(project["optional-dependencies"])


def call(function, folder, path=None):
    """Calls one function of .ci/environment, with the commands in `folder` first on PATH."""
    functions = (ROOT / ".ci" / "environment").read_text().partition("\nmake_venv\n")[0]
    functions = functions.replace('cd "$(dirname "${BASH_SOURCE[0]}")/.."\n', "")
    path = path or f"{folder}:{os.environ['PATH']}"
    return run(["bash", "-c", f"{functions}\n{function}"], folder, PATH=path)


def stand_in(path, body):
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)


def answer_uname(system):
    kernel, machine = system.split()
    return f'if [ "$1" = -s ]; then echo {kernel}; else echo {machine}; fi'


def test_make_chooses_the_extra_that_fits_the_machine(tmp_path):
    """The choice alone: uname and nvidia-smi are stand-ins on PATH, and nothing is installed."""
    for system, driver, expected in (
        ("Darwin arm64", None, ""),
        ("Linux x86_64", None, "cpu"),
        ("Linux x86_64", "535.183.01", "cpu"),
        ("Linux aarch64", "550.54.14", "cuda12"),
        ("Linux x86_64", "580.65.06", "cuda13"),
    ):
        stand_in(tmp_path / "uname", answer_uname(system))
        stand_in(tmp_path / "nvidia-smi", f"echo {driver}" if driver else "exit 9")
        done = call("backend", tmp_path)
        assert (done.returncode, done.stdout.strip()) == (0, expected), done.stderr


def test_make_says_where_mlx_does_not_run(tmp_path):
    stand_in(tmp_path / "uname", answer_uname("Darwin x86_64"))
    done = call("backend", tmp_path)
    assert done.returncode == 1
    assert "not on Darwin x86_64" in done.stderr


def test_make_passes_over_a_python_that_does_not_run(tmp_path):
    """A shim named python3.12 that fails, as version managers leave behind, is not taken."""
    stand_in(tmp_path / "python3.12", "echo 'python3.12: command not found' >&2; exit 127")
    stand_in(tmp_path / "python3.13", f'exec {sys.executable} "$@"')
    done = call("find_python", tmp_path, path=f"{tmp_path}:/usr/bin:/bin")
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() != str(tmp_path / "python3.12")
