"""The command itself: what it prints where, its exit codes, and that it answers at once."""

import logging
import os
import resource
import signal
import subprocess
import sys
import textwrap

import pytest

from mlxft import cli
from mlxft.errors import GuardStop, InputError, Interrupted
from tests.command import environment, mlxft
from tests.tiny_models import make_model

RECIPE = "# Made up, for a test.\nmodel: {path: owner/name}\ndata: {train: rows.jsonl}\n"


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """A folder to be in, with rows.jsonl and a recipe of the user's."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.jsonl").write_text('{"text": "a"}\n')
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes" / "made_up.yaml").write_text(RECIPE)
    return tmp_path


@pytest.mark.parametrize(
    "arguments", [[], ["--help"], ["--version"], ["recipes"], ["train", "--help"], ["preview", "--help"]]
)
def test_help_and_recipes_answer_in_under_a_second(arguments):
    """A second of a core's: other programs make the clock on the wall run longer."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = mlxft(*arguments)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == 0
    assert done.stdout and not done.stderr
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 1.0


def test_mlx_without_a_part_that_computes_is_named_with_what_to_install(tmp_path):
    """As `pip install mlx` alone leaves it on Linux."""
    package = tmp_path / "mlx"
    package.mkdir()
    (package / "__init__.py").touch()
    why = "libmlx.so: cannot open shared object file: No such file or directory"
    (package / "core.py").write_text(f"raise ImportError({why!r})")
    path = os.pathsep.join([str(tmp_path), environment()["PYTHONPATH"]])
    done = mlxft("plan", "model.path=x", "data.train=y", env=environment(PYTHONPATH=path))
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert f"MLX has nothing to compute with here ({why}). Install one of mlxft[cpu], " in done.stderr


def test_an_interruption_within_a_destructor_ends_the_command_too():
    """Python cannot pass on an exception of a destructor; the command would go on as if nothing was."""
    program = textwrap.dedent("""
        import os, signal, sys, time
        from mlxft import cli

        class Dying:
            def __del__(self):
                os.kill(os.getpid(), signal.SIGINT)
                time.sleep(0.05)

        def run(arguments):
            Dying()
            time.sleep(20)
            return 0

        cli.COMMANDS["doctor"] = cli.Command("", str, run)
        sys.exit(cli.main(["doctor"]))
    """)
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment(), capture_output=True, text=True, timeout=15
    )
    assert (done.returncode, done.stderr) == (130, "mlxft: interrupted\n")


def test_help_and_recipes_import_nothing_heavy():
    program = (
        "import sys; from mlxft.cli import main; "
        "commands = ('train', 'eval', 'generate', 'export', 'preview', 'plan'); "
        "[main([command, '--help']) for command in commands]; "
        "main(['--help']); main(['recipes']); "
        "heavy = {'mlx.core', 'transformers', 'datasets', 'hydra', 'numpy', 'rich'} & set(sys.modules); "
        "sys.exit(f'imported {heavy}' if heavy else 0)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        env=environment(),
    )
    assert done.returncode == 0, done.stderr


def test_a_wrong_configuration_ends_with_2_and_a_message_without_a_traceback():
    done = mlxft("train", "model.path=owner/name", "+trainer.lrr=1", "data.train=nowhere.jsonl")
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("mlxft: the configuration has 2 problems:\n")
    assert "  trainer.lrr: there is no such key; did you mean optimizer.lr?\n" in done.stderr
    assert "  data.train: there is no file nowhere.jsonl" in done.stderr
    assert "Traceback" not in done.stderr


def test_an_unknown_recipe_ends_with_2_and_the_list():
    done = mlxft("train", "+recipe=made_upp")
    assert done.returncode == 2
    assert "'made_upp' does not exist; did you mean made_up?" in done.stderr


@pytest.mark.parametrize("command", ["train", "eval", "generate", "preview", "plan"])
def test_a_typo_ends_every_command_that_takes_keys_with_2(command, capsys):
    assert cli.main([command, "modl.path=x"]) == 2
    assert "did you mean model.path?" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["trian"], "did you mean mlxft train?"),
        (["zzz"], "there are train, eval, generate, quantize, export, chat, serve, preview, plan"),
        (["optimizer.lr=1"], "the command comes first: mlxft train optimizer.lr=1"),
        (["recipes", "made_upp"], "did you mean made_up?"),
        (["recipes", "copy"], "takes nothing, NAME, or copy NAME"),
        (["recipes", "copy", "made_up"], "exists already"),
    ],
)
def test_a_wrong_command_is_explained_and_ends_with_2(arguments, words, capsys):
    assert cli.main(arguments) == 2
    assert words in capsys.readouterr().err


def test_config_prints_the_composed_configuration_and_stops(folder, capsys):
    assert cli.main(["train", "--config", "+recipe=made_up", "optimizer.lr=1e-4"]) == 0
    printed = capsys.readouterr().out
    assert "  path: owner/name\n" in printed
    assert "  lr: 0.0001\n" in printed
    assert not (folder / "runs").exists()


def test_recipes_are_listed_shown_and_copied(folder, capsys, monkeypatch):
    assert cli.main(["recipes"]) == 0
    assert "made_up" in (listed := capsys.readouterr().out)
    assert "Made up, for a test. (yours: recipes/made_up.yaml)" in listed
    assert cli.main(["recipes", "made_up"]) == 0
    assert capsys.readouterr().out == RECIPE

    # A recipe of mlxft's own: the folder of another installation stands in for the package's.
    monkeypatch.setattr("mlxft.config.recipes.folder", lambda name: folder / "recipes")
    (folder / "elsewhere").mkdir()
    monkeypatch.chdir(folder / "elsewhere")
    assert cli.main(["recipes", "copy", "made_up"]) == 0
    assert (folder / "elsewhere" / "recipes" / "made_up.yaml").read_text() == RECIPE


@pytest.mark.parametrize(
    "error, code, words",
    [
        (InputError("rows.jsonl:3: not JSON"), 2, "mlxft: rows.jsonl:3: not JSON\n"),
        (GuardStop("gradients are not finite"), 3, "mlxft: gradients are not finite\n"),
        (Interrupted("stopped at step 3", signal.SIGTERM), 143, "mlxft: stopped at step 3\n"),
        (KeyboardInterrupt(), 130, "mlxft: interrupted\n"),
    ],
)
def test_each_end_has_its_exit_code(error, code, words, monkeypatch, capsys):
    def end(arguments):
        raise error

    monkeypatch.setitem(cli.COMMANDS, "doctor", cli.Command("", str, end))
    assert cli.main(["doctor"]) == code
    assert capsys.readouterr().err == words


def test_a_fault_of_ours_ends_with_1_a_traceback_and_says_so(monkeypatch, capsys):
    monkeypatch.setitem(cli.COMMANDS, "doctor", cli.Command("", str, lambda arguments: 1 // 0))
    assert cli.main(["doctor"]) == 1
    text = capsys.readouterr().err
    assert "ZeroDivisionError" in text
    assert text.endswith(
        "this is a fault of mlxft, not of your input. Please report it with the text above.\n"
    )


def test_a_reader_that_goes_away_is_no_fault():
    # A pipe nobody reads: writing to it is what `mlxft train --help | head -1` comes to.
    reading, writing = os.pipe()
    os.close(reading)
    done = mlxft("train", "--help", stdout=writing)
    os.close(writing)
    assert (done.returncode, done.stderr) == (141, "")


def test_a_full_disk_under_the_output_is_said_and_ends_with_3(tmp_path):
    """/dev/full takes nothing, as a disk without room: on standard output, then on standard error too."""
    model = make_model(tmp_path / "model", "llama")
    for command in (
        ["--help"],
        ["recipes"],
        ["train", "--config", f"model.path={model}", "data.train=rows.jsonl"],
        ["eval", f"model.path={model}", "data.valid=rows.jsonl"],
        ["eval", "--json", f"model.path={model}", "data.valid=rows.jsonl"],
        ["generate", f"model.path={model}", "prompt=a", "max_tokens=2"],
        ["preview", f"model.path={model}", "data.train=rows.jsonl"],
        ["plan", f"model.path={model}", "data.train=rows.jsonl"],
    ):
        with open("/dev/full", "w") as full:
            done = mlxft(*command, stdout=full)
        last = done.stderr.splitlines()[-1]
        assert last == (
            "mlxft: the output could not be written: No space left on device; free some space, then try again"
        )
        assert done.returncode == 3 and "Traceback" not in done.stderr
    with open("/dev/full", "w") as full:
        done = mlxft("recipes", stdout=full, stderr=full)
    assert done.returncode == 3
    with open("/dev/full", "w") as full:  # what is said beside an answer is no part of it
        done = mlxft("generate", f"model.path={model}", "prompt=a", "max_tokens=2", stderr=full)
    assert done.returncode == 0 and done.stdout


def test_python_takes_a_dictionary_a_config_or_overrides_with_the_same_check():
    import mlxft
    from mlxft.config import Config

    for wrong in ({"trainer": {"lrr": 1}}, Config(), ["trainer.lrr=1"]):
        with pytest.raises(InputError, match="model.path: it is missing"):
            mlxft.train(wrong)


def test_what_is_said_on_the_way_goes_to_standard_error_once(monkeypatch, capsys):
    def work(arguments):
        logging.getLogger("mlxft").info("said on the way")
        logging.getLogger("mlxft").error("for the run's log alone", extra={"file_only": True})
        print("the result")
        return 0

    monkeypatch.setitem(cli.COMMANDS, "doctor", cli.Command("", str, work))
    for _ in range(2):
        assert cli.main(["doctor"]) == 0
        assert capsys.readouterr() == ("the result\n", "said on the way\n")
