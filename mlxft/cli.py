"""`mlxft`: finds the command, hands its arguments on, and turns what comes back into an exit code.

Everything heavy is imported by the command that needs it: help and recipes answer at once.
"""

import errno
import logging
import os
import shutil
import signal
import sys
import textwrap
import threading
import traceback
from collections.abc import Callable
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from mlxft import usage
from mlxft.errors import EXIT_DONE, EXIT_FAULT, EXIT_GUARD, InputError, MlxftError

EXIT_INTERRUPTED = 128 + 2  # SIGINT
EXIT_BROKEN_PIPE = 128 + 13  # SIGPIPE

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
# What a file or folder that was named can be like, wherever it is first looked at.
_NOT_OURS = {
    errno.ENAMETOOLONG: "Give a shorter name",
    errno.EACCES: "Give this user the permission, or name another",
    errno.EPERM: "Give this user the permission, or name another",
    errno.ELOOP: "It is a link that leads to itself",
}


@dataclass(frozen=True)
class Command:
    """A command: the line --help shows for it, its own help, and what it does with its arguments."""

    summary: str
    help: Callable[[], str]
    run: Callable[[list[str]], int]


def main(arguments: list[str] | None = None) -> int:
    """Runs one command and returns its exit code.

    0 done, 1 a fault of ours, 2 wrong input, 3 stopped by a guard, 128 + N stopped by signal N.
    """
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    sys.unraisablehook = _raise_interrupt_again
    try:
        code = _dispatch(arguments)
        if sys.stdout:  # closed from the start, it is None
            sys.stdout.flush()
        return code
    except MlxftError as error:
        _tell(f"mlxft: {error}")
        return error.exit_code
    except KeyboardInterrupt:
        _tell("mlxft: interrupted")
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        _close_output()
        return EXIT_BROKEN_PIPE
    except Exception as error:
        if isinstance(error, ImportError) and (missing := _missing_backend(error)):
            _tell(f"mlxft: {missing}")
            return InputError.exit_code
        if isinstance(error, OSError) and error.errno in _NO_ROOM:
            what = error.filename or "the output"
            _tell(f"mlxft: {what} could not be written: {error.strerror}; free some space, then try again")
            _close_output()
            return EXIT_GUARD
        if isinstance(error, OSError) and error.errno in _NOT_OURS and error.filename is not None:
            _tell(f"mlxft: {error.filename} cannot be used: {error.strerror}. {_NOT_OURS[error.errno]}")
            return InputError.exit_code
        _tell(traceback.format_exc())
        _tell("mlxft: this is a fault of mlxft, not of your input. Please report it with the text above.")
        return EXIT_FAULT


def _raise_interrupt_again(unraisable: Any) -> None:
    """Raises a KeyboardInterrupt once more that came while Python could not pass it on, in a destructor."""
    if isinstance(unraisable.exc_value, KeyboardInterrupt):
        main = threading.main_thread().ident  # a real signal, which also ends what it waits for
        threading.Timer(0.01, signal.pthread_kill, (main, signal.SIGINT)).start()
    else:
        sys.__unraisablehook__(unraisable)


def _missing_backend(error: ImportError) -> str:
    """Returns what to install where MLX came without the part that computes, which Linux needs; else ""."""
    if "libmlx" not in str(error) and (error.name or "").partition(".")[0] != "mlx":
        return ""
    return (
        f"MLX has nothing to compute with here ({error}). Install one of mlxft[cpu], mlxft[cuda13] (NVIDIA "
        "driver 580 or later) and mlxft[cuda12] (550 or later); from a checkout: pip install -e '.[cpu]'"
    )


def _tell(text: str) -> None:
    with suppress(OSError):  # standard error may lie on the full disk too: the exit code still tells
        print(text, file=sys.stderr)


def _close_output() -> None:
    """Leads standard output nowhere: the interpreter flushes it once more at its end, and would complain."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _dispatch(arguments: list[str]) -> int:
    if not arguments or arguments[0] in ("--help", "-h", "help"):
        print(_overview())
        return EXIT_DONE
    if arguments[0] == "--version":
        from mlxft import __version__

        print(f"mlxft {__version__}")
        return EXIT_DONE
    name, *rest = arguments
    if name not in COMMANDS:
        raise InputError(_unknown_command(name))
    if any(argument in ("--help", "-h") for argument in rest):
        print(COMMANDS[name].help())
        return EXIT_DONE
    with _messages_on_stderr():
        return COMMANDS[name].run(rest)


class _Stderr(logging.Handler):
    """Prints to what sys.stderr is at that moment: a progress bar puts something of its own there."""

    def emit(self, record: logging.LogRecord) -> None:
        if not getattr(record, "file_only", False):
            _tell(self.format(record))


@contextmanager
def _messages_on_stderr():
    """Shows what mlxft says while it works; standard output is left to results."""
    log, handler = logging.getLogger("mlxft"), _Stderr()
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    try:
        yield
    finally:
        log.removeHandler(handler)


def _unknown_command(name: str) -> str:
    from mlxft.config.keys import nearest

    if "=" in name:
        return f"{name} is a setting, not a command; the command comes first: mlxft train {name}"
    near = nearest(name, COMMANDS)
    hint = f"did you mean mlxft {near}? " if near else ""
    return f"there is no command {name!r}; {hint}there are {', '.join(COMMANDS)} (mlxft --help)"


def _overview() -> str:
    lines = [f"  {name:<10}{command.summary}" for name, command in COMMANDS.items()]
    return "\n".join(
        [
            "Fine-tuning on MLX: Apple silicon, NVIDIA GPUs and plain CPUs.",
            "",
            "usage: mlxft COMMAND [+recipe=NAME] [KEY=VALUE ...]",
            "",
            *lines,
            "",
            "mlxft COMMAND --help explains a command and lists its keys; mlxft --version says which this is.",
            "",
            "  mlxft train +recipe=quickstart",
            "  mlxft train model=smollm2 data.train=rows.jsonl trainer.max_steps=200",
        ]
    )


def _train(arguments: list[str]) -> int:
    from mlxft.config import compose, to_yaml

    if several := [argument for argument in arguments if argument in ("-m", "--multirun")]:
        from mlxft.sweeps.command import main

        return main([argument for argument in arguments if argument not in several])
    composed = compose([argument for argument in arguments if argument != "--config"])
    if "--config" in arguments:
        print(to_yaml(composed.config), end="")
        return EXIT_DONE
    from mlxft.training.run import train

    train(composed)
    return EXIT_DONE


def _recipes(arguments: list[str]) -> int:
    from mlxft.config.recipes import find_recipe, find_recipes

    if not arguments:
        print(_recipe_list())
    elif arguments[0] == "copy" and len(arguments) == 2:
        print(_copy_recipe(arguments[1]))
    elif len(arguments) == 1 and arguments[0] != "copy":
        print(find_recipe(arguments[0]).path.read_text(encoding="utf-8", errors="replace"), end="")
    else:
        raise InputError(
            f"mlxft recipes takes nothing, NAME, or copy NAME; there is {', '.join(find_recipes())}"
        )
    return EXIT_DONE


def _recipe_list() -> str:
    from mlxft.config.recipes import USERS_FOLDER, description, find_recipes

    recipes = find_recipes()
    column = max(map(len, recipes), default=0) + 2
    width = max(shutil.get_terminal_size().columns, column + 40)
    lines = []
    for name, recipe in recipes.items():
        own = f" (yours: {recipe.shown_path})" if recipe.path.parent == USERS_FOLDER else ""
        text = (description(recipe) or "no description") + own
        lines.append(
            textwrap.fill(text, width, initial_indent=f"{name:<{column}}", subsequent_indent=" " * column)
        )
    lines.append(
        "\nmlxft train +recipe=NAME runs one; mlxft recipes copy NAME copies it to ./recipes to change it."
    )
    return "\n".join(lines)


def _copy_recipe(name: str) -> str:
    from mlxft.config.recipes import USERS_FOLDER, find_recipe

    source = find_recipe(name).path
    target = USERS_FOLDER / f"{Path(name).name}.yaml"
    if target.exists():
        raise InputError(f"{target} exists already; +recipe={name} uses it")
    try:
        target.parent.mkdir(exist_ok=True)
        target.write_bytes(source.read_bytes())
    except OSError as error:
        raise InputError(f"{target} can't be written: {error.strerror}") from None
    return f"{target}: +recipe={name} finds it first from here on"


def _main_of(module: str) -> Callable[[list[str]], int]:
    """Returns the command that is a module's `main`, which is imported when the command runs."""
    return lambda arguments: import_module(module).main(arguments)


COMMANDS = {
    "train": Command("fine-tune a model", usage.train, _train),
    "eval": Command("what a model makes of a file of rows", usage.eval, _main_of("mlxft.evaluation.command")),
    "generate": Command("one answer of a model", usage.generate, _main_of("mlxft.evaluation.generate")),
    "quantize": Command("fewer bits a weight", usage.quantize, _main_of("mlxft.quantising.command")),
    "export": Command("an adapter for other programs", usage.export, _main_of("mlxft.export.command")),
    "chat": Command("a conversation in the terminal", usage.chat, _main_of("mlxft.serving.terminal")),
    "serve": Command("a model for OpenAI's clients", usage.serve, _main_of("mlxft.serving.command")),
    "preview": Command("what training will see of the rows", usage.preview, _main_of("mlxft.data.preview")),
    "plan": Command("memory and time a run will take", usage.plan, _main_of("mlxft.planning.command")),
    "runs": Command("list, compare or delete runs", usage.runs, _main_of("mlxft.runs.command")),
    "recipes": Command("list, show or copy the recipes", usage.recipes, _recipes),
    "migrate": Command(
        "an mlx-lm configuration as a recipe", usage.migrate, _main_of("mlxft.config.migrate")
    ),
    "doctor": Command(
        "backend, versions, BLAS, memory and speed of this machine", usage.doctor, _main_of("mlxft.doctor")
    ),
}
