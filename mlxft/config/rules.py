"""What each key's values have to be, beyond their type: ranges, choices, and forms of their own."""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlxft.config import choices
from mlxft.config.convert import converted, number_of, shown, text_of, truth_of, whole_of
from mlxft.config.keys import nearest

Rule = Callable[[Any], Any]


def one_of(known: Sequence[str]) -> Rule:
    """Returns a rule that accepts the names in `known`, in any case."""

    def rule(value: Any) -> str:
        if value.lower() in known:
            return value.lower()
        near = nearest(value, known)
        hint = f"did you mean {near}? " if near else ""
        raise ValueError(f"{shown(value)} is not known; {hint}there {_is(known)} {', '.join(known)}")

    return rule


def _is(known: Sequence[str]) -> str:
    return "is only" if len(known) == 1 else "are"




@dataclass(frozen=True)
class Range:
    """A rule for numbers from `low` to `high`, either end left out if it is open."""

    low: float
    high: float = math.inf
    open_low: bool = False
    open_high: bool = False

    @property
    def bounds(self) -> str:
        """The range in words."""
        low, high = (f"{end:.0f}" if float(end).is_integer() else f"{end:g}" for end in (self.low, self.high))
        at_least = f"more than {low}" if self.open_low else f"at least {low}"
        at_most = f" and less than {high}" if self.open_high else f" and at most {high}"
        return at_least if self.high == math.inf else at_least + at_most

    def __call__(self, value: Any) -> Any:
        too_low = value <= self.low if self.open_low else value < self.low
        too_high = value >= self.high if self.open_high else value > self.high
        if too_low or too_high:
            raise ValueError(f"{value} is out of range; it must be {self.bounds}")
        return value


def _betas(value: list[float]) -> list[float]:
    if len(value) != 2:
        raise ValueError(f"{value} must be two numbers, for example [0.9,0.999]")
    return [Range(0, 1, open_high=True)(beta) for beta in value]


def _number_or(*words: str, number: Rule, called: str) -> Rule:
    """Returns a rule that accepts `words` in any case, and what `number` accepts, which messages call so."""

    def rule(value: Any) -> Any:
        text = str(value).strip().lower()
        if text in words:
            return text
        try:
            return number(value)
        except ValueError:
            known = ", nor ".join(f'"{word}"' for word in words)
            raise ValueError(f"{shown(value)} is neither {called}, nor {known}") from None

    return rule


def _count(value: Any) -> int:
    return Range(1)(whole_of(value))


_GIGABYTES = "a number of GB between 0 and a million"
_MOST_GIGABYTES = 1e6  # more than any machine has: somebody wrote bytes


def _gigabytes(value: Any) -> float:
    return Range(0, _MOST_GIGABYTES, open_low=True)(number_of(value))


def _auto_or_truth(value: Any) -> Any:
    text = str(value).strip().lower()
    return text if text == "auto" else truth_of(value)


def _layers(value: Any) -> str:
    text = str(value).strip().lower()
    number = text.removeprefix("last ").strip()
    if text == "all":
        return "all"
    if number.isdecimal() and int(number) > 0 and not isinstance(value, bool):
        return f"last {int(number)}"
    raise ValueError(f'{shown(value)} is neither "all" nor a number of last layers: 8, or "last 8"')


def _targets(value: Any) -> list[str]:
    return _names(value, "layer", "[q_proj,v_proj]", "adapt all of a block's")


def _tasks(value: Any) -> list[str]:
    return _names(value, "task", "[arc_easy,mine.yaml]", "score rows")


def _pattern(value: str) -> str:
    try:
        re.compile(value)
    except re.error as error:
        raise ValueError(f"{shown(value)} is no pattern: {error}") from None
    return value


def _modules(value: Any) -> list[str]:
    return _names(value, "module", "[norm,lm_head]", "train none whole")


def _names(value: Any, what: str, example: str, without: str) -> list[str]:
    names = value.split(",") if isinstance(value, str) else value
    if isinstance(names, Mapping) or not isinstance(names, Sequence):
        raise ValueError(f"{shown(value)} is not a list of names of {what}s; write {example}")
    names = [text_of(name).strip() for name in names]
    if not names or "" in names:
        raise ValueError(f"an empty name of a {what}; leave the key out to {without}")
    return names


def _path(value: Any) -> str:
    text = text_of(value)
    if not text.strip():
        raise ValueError("it is empty; give a name, or leave it out")
    return str(Path(text).expanduser()) if text.startswith("~/") else text


def _rows(value: Any) -> Any:
    """Settles data.train and data.valid: a name, {path: NAME, ...}, or a list of these."""
    if isinstance(value, Mapping):
        return _row_set(value)
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_row_set(item) if isinstance(item, Mapping) else _path(item) for item in value]
    return _path(value)


def _row_set(value: Mapping[str, Any]) -> dict[str, Any]:
    unknown = [name for name in value if name not in choices.SET_KEYS]
    if unknown or value.get("path") in (None, "", []):
        what = f"it has no {unknown[0]!r}" if unknown else "it needs a path"
        raise ValueError(f"a set of rows is {{path: NAME}} with any of {_listed_keys()}; {what}")
    settled: dict[str, Any] = {}
    for name, item in value.items():
        try:
            settled[name] = _SET_RULES[name](item)
        except ValueError as error:
            raise ValueError(f"{name} of {value['path']}: {error}") from None
    return settled


def _listed_keys() -> str:
    return ", ".join(choices.SET_KEYS[1:])


def _paths(value: Any) -> str | list[str]:
    is_list = isinstance(value, Sequence) and not isinstance(value, str)
    return [_path(item) for item in value] if is_list else _path(value)


_SET_RULES: dict[str, Rule] = {
    "path": _paths,
    "weight": lambda value: Range(0, 1e6, open_low=True)(number_of(value)),
    "split": text_of,
    "revision": text_of,
    "subset": text_of,
    "columns": lambda value: converted(dict[str, str], value),
}

def _folders(value: Any) -> str | list[str]:
    if isinstance(value, Mapping):
        raise ValueError("it is a folder or a list of folders, not a dictionary")
    folders = _paths(value)
    if not isinstance(folders, str) and not folders:
        raise ValueError("an empty list of folders; leave the key out to start a new adapter")
    return folders[0] if len(folders) == 1 and not isinstance(folders, str) else folders


def _ranks(value: dict[str, int]) -> dict[str, int]:
    for name, rank in value.items():
        if rank < 1:
            raise ValueError(f"{name}: rank {rank} trains nothing; it must be at least 1")
    return value


def _repository(value: str) -> str:
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", value):
        raise ValueError(f"{shown(value)} is no repository on the hub; one is written USER/NAME")
    return value


def _adapters(value: dict[str, str]) -> dict[str, str]:
    """Settles {name: folder}."""
    for name in value:
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}", name):
            raise ValueError(f"{shown(name)} is no name: letters, digits, and . _ - after them")
    return {name: _path(folder) for name, folder in value.items()}


def _secret(value: str) -> str:
    if not value or not value.isascii() or not value.isprintable() or " " in value:
        raise ValueError("it has to be of printable ASCII characters without spaces, at least one")
    return value


def _weights(value: list[float]) -> list[float]:
    if not value or 0 in value:
        raise ValueError(f"{value}: each must be a number other than 0, for example [0.7,0.3]")
    return value


def _new_tokens(value: Any) -> list[str]:
    example = '["<|call|>","<|result|>"], each in quotes'
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise ValueError(f"{shown(value)} is not a list of tokens; write {example}")
    if not value:
        raise ValueError(f"an empty list; leave the key out, or name tokens: {example}")
    for text in value:
        if not isinstance(text, str):
            raise ValueError(f"{shown(text)} is not a text; write {example}")
        if not text.strip():
            raise ValueError(f"{shown(text)} is no token: it needs a character that is not white space")
        if value.count(text) > 1:
            raise ValueError(f"{shown(text)} is there {value.count(text)} times; name it once")
    return list(value)


def _group_size(value: int) -> int:
    if value not in choices.GROUP_SIZES:
        raise ValueError(f"{value} is not known; there are {', '.join(map(str, choices.GROUP_SIZES))}")
    return value


_COUNT = "a whole number, at least 1"

RULES: dict[str, Rule] = {
    "model.path": _path,
    "model.dtype": one_of(choices.DTYPES),
    "model.new_tokens": _new_tokens,
    "model.new_special_tokens": _new_tokens,
    "data.train": _rows,
    "data.valid": _rows,
    "data.format": one_of(choices.FORMATS),
    "data.buffer": Range(1),
    "data.cache": _auto_or_truth,
    "data.num_workers": _number_or("auto", number=lambda value: Range(0)(whole_of(value)), called="a number"),
    "data.on_bad_row": one_of(choices.BAD_ROWS),
    "data.max_length": Range(2),
    "data.batch_tokens": Range(1),
    "data.truncate": one_of(choices.TRUNCATIONS),
    "data.batch_size": Range(1),
    "data.train_on": one_of(choices.TRAIN_ON),
    "trainer.objective": one_of(choices.OBJECTIVES),
    "trainer.layout": one_of(choices.LAYOUTS),
    "trainer.gradient": one_of(choices.GRADIENTS),
    "trainer.segment_layers": _number_or("auto", "half", number=_count, called=_COUNT),
    "trainer.in_flight": _number_or("auto", number=_count, called=_COUNT),
    "trainer.memory_limit": _number_or("auto", number=_gigabytes, called=_GIGABYTES),
    "trainer.max_steps": Range(1),
    "trainer.epochs": Range(0, 1e5, open_low=True),
    "trainer.accumulate": Range(1),
    "trainer.seed": Range(0, 2**32, open_high=True),
    "trainer.clip_norm": Range(0),
    "trainer.neftune_alpha": Range(0, 1e4),
    "trainer.eval_every": Range(0),
    "trainer.save_every": Range(0),
    "trainer.keep": _number_or("all", number=_count, called="a number of checkpoints, at least 1"),
    "trainer.resume": _path,
    "trainer.patience": Range(0),
    "trainer.min_delta": Range(0),
    "loss.beta": Range(0, open_low=True),
    "loss.variant": one_of(choices.DPO_VARIANTS),
    "loss.label_smoothing": Range(0, 0.5, open_high=True),
    "loss.gamma": Range(0),
    "loss.nll_scope": one_of(choices.NLL_SCOPES),
    "loss.nll_weight": Range(0),
    "loss.desirable_weight": Range(0),
    "loss.undesirable_weight": Range(0),
    "loss.reference": _path,
    "loss.reference_scored": one_of(choices.REFERENCE_TIMES),
    "head.kind": one_of(choices.HEADS),
    "head.chunk": Range(1),
    "adapter.kind": one_of(choices.ADAPTERS),
    "adapter.rank": Range(1),
    "adapter.rank_by": one_of(choices.RANKS_BY),
    "adapter.ranks": _ranks,
    "adapter.alpha": Range(0, 1e6, open_low=True),
    "adapter.dropout": Range(0, 1, open_high=True),
    "adapter.targets": _targets,
    "adapter.layers": _layers,
    "adapter.modules_to_save": _modules,
    "adapter.init_from": _folders,
    "adapter.init_weights": _weights,
    "optimizer.name": one_of(tuple(choices.OPTIMIZERS)),
    "optimizer.lr": Range(0, open_low=True),
    "optimizer.weight_decay": Range(0),
    "optimizer.betas": _betas,
    "optimizer.eps": Range(1e-37),
    "optimizer.lora_plus_ratio": Range(0, 1e4, open_low=True),
    "schedule.name": one_of(choices.SCHEDULES),
    "schedule.warmup_steps": Range(0),
    "schedule.final_ratio": Range(0, 1),
    "schedule.decay_share": Range(0, 1, open_low=True),
    "run.dir": _path,
    "sweep.dir": _path,
    "sweep.resume": _path,
    "sweep.search": one_of(choices.SEARCHES),
    "sweep.trials": Range(1),
    "sweep.seed": Range(0, 2**31, open_high=True),
    "sweep.goal": one_of(choices.GOALS),
    "sweep.jobs": Range(1, 1024),
    "sweep.launcher": one_of(choices.LAUNCHERS),
    "preview.rows": Range(1),
    "preview.split": one_of(choices.SPLITS),
    "eval.reference": _path,
    "eval.stride": Range(1),
    "eval.limit": Range(1),
    "eval.batch_tokens": Range(1),
    "eval.max_tokens": Range(1),
    "eval.extract": _pattern,
    "eval.timeout": Range(0, 3600, open_low=True),
    "eval.tasks": _tasks,
    "eval.num_fewshot": Range(0),
    "server.host": text_of,
    "server.port": Range(0, 65535),
    "server.adapters": _adapters,
    "server.api_key": _secret,
    "server.temperature": Range(0),
    "server.default_tokens": Range(1),
    "server.max_concurrent": Range(1, 4096),
    "server.max_queue": Range(0, 1e6),
    "server.max_choices": Range(1, 128),
    "server.max_messages": Range(1),
    "server.max_body": Range(0, 1e4, open_low=True),
    "server.memory_limit": _number_or("auto", number=_gigabytes, called=_GIGABYTES),
    "server.prompt_cache": Range(0, _MOST_GIGABYTES),
    "server.shutdown_s": Range(0, 1e5),
    "adapters": _adapters,
    "max_tokens": Range(1),
    "temperature": Range(0),
    "top_p": Range(0, 1, open_low=True),
    "seed": Range(0, 2**32, open_high=True),
    "to": one_of(choices.EXPORTS),
    "out": _path,
    "to.quantize": one_of(choices.QUANTIZATIONS),
    "bits": Range(2, 8),
    "group_size": _group_size,
    "block": Range(32, 256),
    "calibration_rows": Range(1),
    "dtype": one_of(choices.DTYPES),
    "quantization": one_of(choices.EXPORTED_QUANTIZATIONS),
    "gguf": one_of(choices.EXPORTED_GGUF),
    "limit": Range(0),
    "hub": _repository,
}
