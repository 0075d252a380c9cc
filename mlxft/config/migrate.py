"""`mlxft migrate`: a training configuration of mlx-lm (`mlx_lm.lora --config`) as a recipe.

What a file leaves out stands at mlx-lm's default, which the recipe writes out: the run is the same one.
Source: CONFIG_DEFAULTS of mlx_lm/lora.py, version 0.32.
"""

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from mlxft.config.choices import OPTIMIZERS
from mlxft.config.keys import nearest, nest
from mlxft.config.recipes import USERS_FOLDER
from mlxft.errors import InputError

_DEFAULTS: dict[str, Any] = {
    "model": "Qwen/Qwen3-0.6b",
    "train": False,
    "fine_tune_type": "lora",
    "optimizer": "adam",
    "optimizer_config": {},
    "data": "mlx-community/WikiSQL",
    "seed": 0,
    "num_layers": 16,
    "batch_size": 4,
    "iters": 1000,
    "val_batches": 25,
    "learning_rate": 1e-5,
    "steps_per_report": 10,
    "steps_per_eval": 200,
    "resume_adapter_file": None,
    "adapter_path": "adapters",
    "save_every": 100,
    "test": False,
    "test_batches": 500,
    "max_seq_length": 2048,
    "config": None,
    "grad_checkpoint": False,
    "grad_accumulation_steps": 1,
    "clear_cache_threshold": 0,
    "lr_schedule": None,
    "lora_parameters": {"rank": 8, "dropout": 0.0, "scale": 20.0},
    "mask_prompt": False,
    "report_to": None,
    "project_name": None,
    "trust_remote_code": False,
    "prompt_feature": "prompt",
    "completion_feature": "completion",
    "chat_feature": "messages",
    "text_feature": "text",
}
_COLUMNS = {
    "prompt_feature": "prompt",
    "completion_feature": "completion",
    "chat_feature": "messages",
    "text_feature": "text",
}
# Settings that need no counterpart here, and why.
_NOT_NEEDED = {
    "steps_per_report": "metrics.jsonl has every step",
    "val_batches": "every validation reads all of data.valid",
    "clear_cache_threshold": "memory is watched by trainer.memory_limit",
    "project_name": "it names a tracker's project",
}
# MLX's defaults, as far as mlxft's are others.
_OPTIMIZER_DEFAULTS: dict[str, dict[str, Any]] = {
    "adam": {"bias_correction": False},
    "adamw": {"bias_correction": False},
    "muon": {},
    "sgd": {"weight_decay": 0.0},
    "adafactor": {"weight_decay": 0.0},
}


@dataclass
class Migrated:
    """A recipe's keys by full name, and in words what the run will do otherwise than there."""

    keys: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def to_yaml(self, source: str) -> str:
        """Returns the recipe's text, the notes before it as comments."""
        lines = [f"From {source}, a configuration of mlx-lm.", *self.notes]
        comments = "".join(f"# {line}\n" for line in lines)
        return comments + yaml.safe_dump(nest(self.keys), sort_keys=False, allow_unicode=True)


def main(arguments: list[str]) -> int:
    """Runs `mlxft migrate FILE` and returns its exit code. Raises: InputError."""
    if len(arguments) != 1 or arguments[0].startswith("-"):
        example = f"mlxft migrate lora_config.yaml > {USERS_FOLDER}/mine.yaml"
        raise InputError(f"mlxft migrate takes one file: {example}")
    print(migrate(Path(arguments[0])).to_yaml(arguments[0]), end="")
    return 0


def migrate(path: Path) -> Migrated:
    """Returns what the configuration in `path` is here.

    Raises: InputError for a file that cannot be read, a setting that mlx-lm does not have, or one that
    nothing here corresponds to and that would change what is trained.
    """
    given = _read(path)
    unknown = [name for name in given if name not in _DEFAULTS]
    if unknown:
        hints = [f"  {name}: {_hint(name)}" for name in unknown]
        raise InputError("\n".join([f"{path} has settings that mlx-lm does not have:", *hints]))
    settings = _DEFAULTS | {name: value for name, value in given.items() if value is not None}
    _check(settings)
    made = Migrated()
    for part in (_model_and_data, _loop, _adapter, _optimizer, _schedule):
        part(settings, made)
    made.notes += [f"Left out {name}: {_NOT_NEEDED[name]}." for name in given if name in _NOT_NEEDED]
    return made


def _read(path: Path) -> dict[str, Any]:
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror})") from None
    except (yaml.YAMLError, UnicodeDecodeError, ValueError, RecursionError) as error:
        raise InputError(f"{path}: not YAML ({' '.join(str(error).split())})") from None
    if not isinstance(values, dict):
        raise InputError(f"{path}: holds no settings; mlx-lm's files have lines like 'model: NAME'")
    try:
        return {str(name): _as_number(value) for name, value in values.items()}
    except RecursionError:
        raise InputError(f"{path}: a value holds itself") from None


def _as_number(value: Any) -> Any:
    """Returns 1e-5 as the number that mlx-lm reads it as: to YAML it is text."""
    if isinstance(value, str):
        try:
            return float(value)
        except ValueError:
            return value
    if isinstance(value, list):
        return [_as_number(each) for each in value]
    if isinstance(value, dict):
        return {name: _as_number(each) for name, each in value.items()}
    return value


def _check(settings: dict[str, Any]) -> None:
    """Raises: InputError for values of another kind than mlx-lm's."""
    for name, default in _DEFAULTS.items():
        if isinstance(default, int | float) and not isinstance(default, bool):
            _number(settings[name], name)
    if settings["grad_accumulation_steps"] < 1:
        raise InputError("grad_accumulation_steps: it has to be at least 1")
    for name in ("lora_parameters", "optimizer_config", "lr_schedule"):
        if settings[name] is not None and not isinstance(settings[name], dict):
            raise InputError(f"{name}: {settings[name]!r} is no set of settings, {{name: value}}")
    for name in ("rank", "scale", "dropout"):
        if name in settings["lora_parameters"]:
            _number(settings["lora_parameters"][name], f"lora_parameters.{name}")


def _number(value: Any, name: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise InputError(f"{name}: {value!r} is not a number")
    return value


def _hint(name: str) -> str:
    near = nearest(name, _DEFAULTS)
    return f"did you mean {near}?" if near else "nothing there has such a name"


def _model_and_data(settings: dict[str, Any], made: Migrated) -> None:
    if settings["trust_remote_code"]:
        raise InputError("trust_remote_code: code that comes with a model is never run here")
    made.keys["model.path"] = settings["model"]
    data = str(settings["data"])
    folder = Path(data).expanduser()
    if folder.is_dir():
        made.keys["data.train"] = str(Path(data) / "train.jsonl")
        if (folder / "valid.jsonl").exists():
            made.keys["data.valid"] = str(Path(data) / "valid.jsonl")
    else:
        made.keys["data.train"] = data
        made.notes.append(f"{data} is no folder here: name the rows in data.train, and in data.valid if any.")
    columns = {ours: settings[name] for name, ours in _COLUMNS.items() if settings[name] != ours}
    if columns:
        made.keys["data.columns"] = columns
    # mlx-lm masks all but the last message, or nothing.
    made.keys["data.train_on"] = "last_assistant" if settings["mask_prompt"] else "all"
    made.keys |= {"data.max_length": settings["max_seq_length"], "data.truncate": "right"}
    made.keys["data.batch_size"] = settings["batch_size"]
    if settings["test"]:
        tested = Path(data) / "test.jsonl"
        made.notes.append(f"To test: mlxft eval +recipe=NAME data.valid={tested} adapter.init_from=ADAPTER.")


def _loop(settings: dict[str, Any], made: Migrated) -> None:
    accumulate = settings["grad_accumulation_steps"]
    # mlx-lm counts micro-batches, here steps are the optimiser's.
    steps = {"trainer.max_steps": "iters", "trainer.save_every": "save_every"}
    if "data.valid" in made.keys:
        steps["trainer.eval_every"] = "steps_per_eval"
    for ours, theirs in steps.items():
        made.keys[ours] = max(int(settings[theirs]) // accumulate, 1)
    made.keys |= {"trainer.accumulate": accumulate, "trainer.seed": settings["seed"]}
    if settings["grad_checkpoint"]:
        made.keys["trainer.gradient"] = "checkpoint"
    made.keys["trainer.clip_norm"] = 0.0
    made.keys["run.dir"] = path = settings["adapter_path"]
    made.notes.append(f"The adapter will be in {path}/adapter, beside checkpoints and metrics.")
    if settings["report_to"]:
        made.notes.append(f"Not sent to {settings['report_to']}: {path}/metrics.jsonl has the figures.")


def _adapter(settings: dict[str, Any], made: Migrated) -> None:
    kind, layers = settings["fine_tune_type"], settings["num_layers"]
    if kind not in ("lora", "dora", "full"):
        raise InputError(f"fine_tune_type: {kind!r} is none of lora, dora, full")
    made.keys["adapter.kind"] = kind
    if kind == "full":
        if layers > 0:
            made.notes.append(f"num_layers={layers} trained the last blocks only; here every weight is.")
        return
    lora = _DEFAULTS["lora_parameters"] | settings["lora_parameters"]
    unknown = sorted(lora.keys() - {"rank", "dropout", "scale", "keys"})
    if unknown:
        raise InputError(f"lora_parameters: mlx-lm has no {', '.join(unknown)} there")
    made.keys |= {
        "adapter.rank": lora["rank"],
        "adapter.alpha": lora["scale"] * lora["rank"],
        "adapter.dropout": lora["dropout"],
        "adapter.layers": "all" if layers < 1 else f"last {layers}",
    }
    if lora.get("keys"):
        made.keys["adapter.targets"] = list(lora["keys"])
    if settings["resume_adapter_file"]:
        made.keys["adapter.init_from"] = str(Path(settings["resume_adapter_file"]).parent)
        for name in ("rank", "alpha", "layers", "targets"):  # the adapter's own
            made.keys.pop(f"adapter.{name}", None)


def _optimizer(settings: dict[str, Any], made: Migrated) -> None:
    name = str(settings["optimizer"]).lower()
    if name not in _OPTIMIZER_DEFAULTS:
        raise InputError(f"optimizer: mlx-lm has no {name!r}, but {', '.join(_OPTIMIZER_DEFAULTS)}")
    made.keys |= {"optimizer.name": name, "optimizer.lr": settings["learning_rate"]}
    own = (settings["optimizer_config"] or {}).get(name) or {}
    unknown = sorted(own.keys() - OPTIMIZERS[name])
    if unknown:
        raise InputError(f"optimizer_config.{name}: {', '.join(unknown)} cannot be set here")
    own = _OPTIMIZER_DEFAULTS[name] | own
    made.keys |= {f"optimizer.{key}": value for key, value in own.items()}
    if name == "adafactor":
        made.notes.append("mlx-lm's adafactor takes steps of its own size; here they are optimizer.lr.")


def _schedule(settings: dict[str, Any], made: Migrated) -> None:
    schedule = settings["lr_schedule"]
    if not schedule:
        made.keys["schedule.name"] = "constant"
        return
    name, arguments = schedule.get("name"), schedule.get("arguments") or []
    warmup = _number(schedule.get("warmup", 0), "lr_schedule.warmup")
    if not isinstance(arguments, list):
        raise InputError(f"lr_schedule.arguments: {arguments!r} is no list")
    for argument in arguments:
        _number(argument, "lr_schedule.arguments")
    made.keys["schedule.warmup_steps"] = warmup
    if schedule.get("warmup_init", 0.0):
        made.notes.append("warmup_init: here the warm-up begins at lr / warmup_steps.")
    if name == "cosine_decay" and len(arguments) in (2, 3):
        first, steps, last = [*arguments, 0.0][:3]
    elif name == "linear_schedule" and len(arguments) == 3:
        first, last, steps = arguments
    else:
        raise InputError(f"lr_schedule: {name} with {len(arguments)} arguments has no counterpart here")
    if first <= 0:
        raise InputError(f"lr_schedule.arguments: a learning rate that begins with {first:g} trains nothing")
    made.keys |= {
        "schedule.name": "cosine" if name == "cosine_decay" else "linear",
        "optimizer.lr": first,
        "schedule.final_ratio": last / first,
    }
    total = made.keys["trainer.max_steps"]
    if warmup + steps != total:
        ended = f"{warmup + steps:g}"
        made.notes.append(f"lr_schedule ended after {ended} steps; here with the run, after {total}.")
