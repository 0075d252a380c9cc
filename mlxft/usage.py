"""What `mlxft COMMAND --help` prints: usage, examples, and the keys, taken from the schema when asked for."""


def train() -> str:
    """Returns the help of `mlxft train`."""
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


def eval() -> str:
    """Returns the help of `mlxft eval`."""
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


def generate() -> str:
    """Returns the help of `mlxft generate`."""
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


def serve() -> str:
    """Returns the help of `mlxft serve`."""
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


def chat() -> str:
    """Returns the help of `mlxft chat`."""
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


def quantize() -> str:
    """Returns the help of `mlxft quantize`."""
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


def export() -> str:
    """Returns the help of `mlxft export`."""
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


def preview() -> str:
    """Returns the help of `mlxft preview`."""
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


def plan() -> str:
    """Returns the help of `mlxft plan`."""
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


def recipes() -> str:
    """Returns the help of `mlxft recipes`."""
    return """\
usage: mlxft recipes [NAME | copy NAME]

Lists the recipes, shows one, or copies one to ./recipes, where +recipe=NAME finds it before mlxft's own."""


def runs() -> str:
    """Returns the help of `mlxft runs`."""
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


def migrate() -> str:
    """Returns the help of `mlxft migrate`."""
    return """\
usage: mlxft migrate FILE

Prints a training configuration of mlx-lm (mlx_lm.lora --config FILE) as a recipe. What the run will do
otherwise stands in it as comments; a setting that has no counterpart is refused.

  mlxft migrate lora_config.yaml > recipes/mine.yaml
  mlxft train +recipe=mine"""


def doctor() -> str:
    """Returns the help of `mlxft doctor`."""
    return """\
usage: mlxft doctor [--json] [--online]

Says in one screen what mlxft runs on: backend, versions, BLAS, memory and speed.

--json prints the same as JSON; --online also sees whether the model hub can be reached."""
