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


def _train_help() -> str:
    from mlxft.config.reference import sweep_keys, training_keys

    return f"""\
usage: mlxft train [--config] [+recipe=NAME] [GROUP=FILE ...] [KEY=VALUE ...]
       mlxft train -m [+sweep=FILE] [+recipe=NAME] [GROUP=FILE ...] [KEY=VALUE,VALUE ...]

Fine-tunes a model on texts, pairs of answers or labelled answers, and writes a run's folder: the adapter,
checkpoints, metrics.

  mlxft train +recipe=quickstart                  a whole run from a file; mlxft recipes lists them
  mlxft train +recipe=quickstart optimizer.lr=1e-4 trainer.epochs=2
  mlxft train model=smollm2 data.train=rows.jsonl
  mlxft train model.path=folder data.train=[a.jsonl,b.jsonl] data.valid=c.jsonl trainer.eval_every=50
  mlxft train +recipe=quickstart trainer=checkpoint optimizer=lion schedule=linear adapter=full
  mlxft train +recipe=quickstart trainer.resume=auto
  mlxft train --config +recipe=quickstart         prints the configuration and stops
  mlxft train -m +recipe=quickstart optimizer.lr=1e-4,3e-4 adapter.rank=8,16       a run for each combination
  mlxft train -m sweep.resume=runs/sweeps/quickstart/TIME                          what is left of them

What comes later wins: every key's default, then the recipe, then files chosen by name, then single keys.

Keys and their defaults (one without a default is decided from the model, or stays off):

{training_keys()}

Of -m:

{sweep_keys()}"""


def _eval_help() -> str:
    from mlxft.config.composition import COMMANDS
    from mlxft.config.reference import evaluation_keys, training_keys

    return f"""\
usage: mlxft eval [--json] [+recipe=NAME] [KEY=VALUE ...]

Says the loss and the perplexity of a model, or of an adapter on it, on a file of texts; of pairs of answers,
how often and by how much the chosen one is likelier; of labelled answers, which way an adapter moved them;
of questions, how many are answered right. Or runs tasks of lm-eval.

  mlxft eval model=smollm2 data.valid=rows.jsonl
  mlxft eval +recipe=quickstart adapter.init_from=runs/quickstart/TIME/adapter eval.reference=base --json
  mlxft eval model=smollm2 eval.tasks=[arc_easy,mine.yaml] eval.limit=100

--json prints one JSON object on standard output.

Keys and their defaults:

{evaluation_keys()}

{training_keys(COMMANDS["eval"].uses)}"""


def _generate_help() -> str:
    from mlxft.config.composition import COMMANDS
    from mlxft.config.reference import generation_keys, training_keys

    return f"""\
usage: mlxft generate [--compare] [+recipe=NAME] KEY=VALUE ... prompt="..."

Prints a model's answer to one prompt. --compare: the base's answer and the adapter's, side by side.

  mlxft generate model=smollm2 prompt="What is the capital of France?"
  mlxft generate +recipe=quickstart adapter.init_from=runs/quickstart/TIME/adapter prompt="Who are you?"

Keys and their defaults:

{generation_keys()}

{training_keys(COMMANDS["generate"].uses)}"""


def _serve_help() -> str:
    from mlxft.config.composition import COMMANDS
    from mlxft.config.reference import server_keys, training_keys

    groups = tuple(name for name in COMMANDS["serve"].uses if name != "server")
    return f"""\
usage: mlxft serve [--provider pi] [+recipe=NAME] [KEY=VALUE ...]

Serves a model and its adapters to OpenAI's and Anthropic's clients, until it is interrupted.

  mlxft serve model=smollm2
  mlxft serve model=smollm2 adapter.init_from=runs/quickstart/TIME/adapter server.port=9000
  mlxft serve model=smollm2 server.adapters={{a:runs/a/adapter,b:runs/b/adapter}}

adapter.init_from is the adapter of requests that name none. --provider pi prints what the coding agent Pi
has to know of the server, and stops.

Keys and their defaults:

{server_keys()}

{training_keys(groups)}"""


def _chat_help() -> str:
    from mlxft.config.composition import COMMANDS
    from mlxft.config.reference import chat_keys, training_keys

    return f"""\
usage: mlxft chat [+recipe=NAME] [KEY=VALUE ...]

A conversation with a model in the terminal. /adapter NAME answers with another adapter from there on, /help
says what else there is.

  mlxft chat model=smollm2
  mlxft chat model=smollm2 adapter.init_from=runs/quickstart/TIME/adapter

Keys and their defaults:

{chat_keys()}

{training_keys(COMMANDS["chat"].uses)}"""


def _quantize_help() -> str:
    from mlxft.config.composition import COMMANDS
    from mlxft.config.reference import quantization_keys, training_keys

    return f"""\
usage: mlxft quantize [--json] model=MODEL to=trellis|affine bits=N out=FOLDER [KEY=VALUE ...]

Writes a model with fewer bits a weight: trellis codes of 2, 3 or 4 bits in the decoder's linear layers, or
mlx-lm's affine groups everywhere. A run that was stopped goes on with the layers that it had finished.

  mlxft quantize model=smollm2 to=trellis bits=3 out=smollm2-3
  mlxft quantize model=smollm2 to=trellis bits=3 data.train=texts.jsonl data.valid=others.jsonl out=smollm2-3
  mlxft quantize model=smollm2 to=affine bits=4 group_size=32 out=smollm2-4

With data.train it calibrates: errors are put where what the layers are given has least use for them.
--json prints one JSON object on standard output.

Keys and their defaults:

{quantization_keys()}

{training_keys(COMMANDS["quantize"].uses)}"""


def _export_help() -> str:
    from mlxft.config.composition import COMMANDS
    from mlxft.config.reference import export_keys, training_keys

    return f"""\
usage: mlxft export [--json] adapter.init_from=FOLDER to=peft|merged|gguf out=FOLDER [KEY=VALUE ...]

Writes a trained adapter in the form that another program loads: PEFT's layout, a whole model with the adapter
merged into it, or GGUF. Its logits are compared with the trained model's before anything is kept.

  mlxft export adapter.init_from=runs/x/adapter to=peft out=peft
  mlxft export adapter.init_from=runs/x/adapter to=merged out=merged dtype=float32
  mlxft export adapter.init_from=runs/x/adapter to=gguf gguf=adapter out=gguf

Without model.path it is the model that the adapter names. --json prints one JSON object on standard output.

Keys and their defaults (of the rows only some are read, to compare on; without them, some sentences):

{export_keys()}

{training_keys(COMMANDS["export"].uses)}"""


def _preview_help() -> str:
    from mlxft.config.reference import preview_keys, training_keys

    read = ("model.path", "model.revision", "data", "trainer.objective", "trainer.layout", "loss.nll_scope")
    return f"""\
usage: mlxft preview [+recipe=NAME] [GROUP=FILE ...] [KEY=VALUE ...]

Shows rows as training will see them, with what is trained on marked, and says what became of all of them.
Of the model only the tokenizer is loaded.

  mlxft preview model=smollm2 data.train=rows.jsonl
  mlxft preview +recipe=dpo preview.split=valid
  mlxft preview +recipe=quickstart preview.rows=1 preview.tokens=true

Takes whatever mlxft train takes and checks it in the same way. Keys and defaults of those that it reads:

{preview_keys()}

{training_keys(read)}"""


def _plan_help() -> str:
    from mlxft.config.composition import COMMANDS
    from mlxft.config.reference import training_keys

    return f"""\
usage: mlxft plan [--json] [+recipe=NAME] [GROUP=FILE ...] [KEY=VALUE ...]

Says what a run will take in memory and time, for each way to run the backward, and which one it would take.
Of the model only headers and the tokenizer are read; a few layers of its shape are tried once and remembered.

  mlxft plan +recipe=quickstart
  mlxft plan model=smollm2 data.train=rows.jsonl data.max_length=8192 data.batch_size=1
  mlxft plan +recipe=quickstart trainer.memory_limit=4 --json

--json prints one JSON object on standard output, sizes in bytes.

Takes whatever mlxft train takes and checks it in the same way. Keys and their defaults:

{training_keys(COMMANDS["plan"].uses)}"""


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


def _recipes_help() -> str:
    return """\
usage: mlxft recipes [NAME | copy NAME]

Lists the recipes, shows one, or copies one to ./recipes, where +recipe=NAME finds it before mlxft's own."""


def _runs_help() -> str:
    return """\
usage: mlxft runs [--json] [FOLDER ...] [sort=KEY] [KEY=VALUE ...]
       mlxft runs compare [--json] RUN RUN ...
       mlxft runs delete [--yes] RUN ...

Lists the runs in runs/, or in folders; compares some: what they were configured with that differs, and what
came of it; deletes some, or whole sweeps, if no process is in them and no other run needs them.

  mlxft runs sort=best_loss                            -best_loss: the largest first
  mlxft runs runs/orpo status=completed optimizer.lr<=1e-4
  mlxft runs compare runs/orpo/TIME runs/simpo/TIME
  mlxft runs delete runs/orpo/TIME

KEY is any key of a run's configuration, or of its results: status (running, completed, early_stopped,
unfinished), steps, loss, best_loss, seconds, tokens_per_s, peak_bytes, started, bytes."""


def _migrate_help() -> str:
    return """\
usage: mlxft migrate FILE

Prints a training configuration of mlx-lm (mlx_lm.lora --config FILE) as a recipe. What the run will do
otherwise stands in it as comments; a setting that has no counterpart is refused.

  mlxft migrate lora_config.yaml > recipes/mine.yaml
  mlxft train +recipe=mine"""


def _doctor_help() -> str:
    return """\
usage: mlxft doctor [--json] [--online]

Says in one screen what mlxft runs on: backend, versions, BLAS, memory and speed.

--json prints the same as JSON; --online also sees whether the model hub can be reached."""


def _main_of(module: str) -> Callable[[list[str]], int]:
    """Returns the command that is a module's `main`, which is imported when the command runs."""
    return lambda arguments: import_module(module).main(arguments)


COMMANDS = {
    "train": Command("fine-tune a model", _train_help, _train),
    "eval": Command("what a model makes of a file of rows", _eval_help, _main_of("mlxft.evaluation.command")),
    "generate": Command("one answer of a model", _generate_help, _main_of("mlxft.evaluation.generate")),
    "quantize": Command("fewer bits a weight", _quantize_help, _main_of("mlxft.quantising.command")),
    "export": Command("an adapter for other programs", _export_help, _main_of("mlxft.export.command")),
    "chat": Command("a conversation in the terminal", _chat_help, _main_of("mlxft.serving.terminal")),
    "serve": Command("a model for OpenAI's clients", _serve_help, _main_of("mlxft.serving.command")),
    "preview": Command("what training will see of the rows", _preview_help, _main_of("mlxft.data.preview")),
    "plan": Command("memory and time a run will take", _plan_help, _main_of("mlxft.planning.command")),
    "runs": Command("list, compare or delete runs", _runs_help, _main_of("mlxft.runs.command")),
    "recipes": Command("list, show or copy the recipes", _recipes_help, _recipes),
    "migrate": Command(
        "an mlx-lm configuration as a recipe", _migrate_help, _main_of("mlxft.config.migrate")
    ),
    "doctor": Command(
        "backend, versions, BLAS, memory and speed of this machine", _doctor_help, _main_of("mlxft.doctor")
    ),
}
