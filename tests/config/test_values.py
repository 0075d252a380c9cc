"""One key at a time: what it accepts, in which form it comes out, and what it says of the rest."""

from pathlib import Path

import numpy as np
import pytest

from mlxft.config.composition import COMMANDS
from mlxft.config.keys import keys_of
from mlxft.config.schema import Config
from mlxft.config.values import RULES, settle

SCHEMAS = [Config, *(command.own for command in COMMANDS.values() if command.own)]
KEYS = keys_of(*SCHEMAS)


@pytest.mark.parametrize(
    "key, given, expected",
    [
        ("optimizer.lr", "1e-4", 1e-4),
        ("optimizer.lr", 1, 1.0),
        ("optimizer.lr", np.float32(0.5), 0.5),
        ("trainer.max_steps", 1000.0, 1000),
        ("trainer.max_steps", "7", 7),
        ("trainer.max_steps", None, None),
        ("trainer.seed", 0, 0),
        ("trainer.deterministic", "True", True),
        ("trainer.keep", "all", "all"),
        ("trainer.keep", "3", 3),
        ("trainer.keep", 1, 1),
        ("trainer.gradient", "Checkpoint", "checkpoint"),
        ("trainer.segment_layers", "2", 2),
        ("trainer.segment_layers", "Half", "half"),
        ("trainer.in_flight", "Auto", "auto"),
        ("optimizer.betas", (0.9, 0.95), [0.9, 0.95]),
        ("optimizer.name", "AdamW", "adamw"),
        ("adapter.layers", "all", "all"),
        ("adapter.layers", 8, "last 8"),
        ("adapter.layers", "last 8", "last 8"),
        ("adapter.layers", "8", "last 8"),
        ("adapter.targets", "q_proj, v_proj", ["q_proj", "v_proj"]),
        ("adapter.targets", ["q_proj"], ["q_proj"]),
        ("adapter.targets", None, None),
        ("adapter.kind", "DoRA", "dora"),
        ("adapter.rslora", "true", True),
        ("adapter.modules_to_save", "norm, lm_head", ["norm", "lm_head"]),
        ("adapter.init_from", "a", "a"),
        ("adapter.init_from", ["a"], "a"),
        ("adapter.init_from", ["a", Path("b")], ["a", "b"]),
        ("adapter.init_weights", ["0.5", -1], [0.5, -1.0]),
        ("schedule.name", "WSD", "wsd"),
        ("model.path", Path("a/b"), "a/b"),
        ("model.path", "~/m", str(Path.home() / "m")),
        ("model.revision", 12345, "12345"),
        ("data.train", ["a.jsonl", Path("b.jsonl")], ["a.jsonl", "b.jsonl"]),
        ("data.columns", {"prompt": "question"}, {"prompt": "question"}),
        ("trainer.samples", ["Who are you?"], ["Who are you?"]),
        ("temperature", 0, 0.0),
    ],
)
def test_a_good_value_comes_out_in_one_form(key, given, expected):
    settled = settle(KEYS[key], given)
    assert settled == expected
    assert type(settled) is type(expected)


@pytest.mark.parametrize(
    "key, given, words",
    [
        ("optimizer.lr", "fast", "'fast' is not a number"),
        ("trainer.memory_limit", 24_000_000_000, "a number of GB between 0 and a million"),
        ("optimizer.lr", True, "true is not a number"),
        ("optimizer.lr", None, "null is not a value"),
        ("optimizer.lr", 0, "more than 0"),
        ("trainer.segment_layers", 0.5, 'nor "auto", nor "half"'),
        ("trainer.segment_layers", 0, 'nor "auto", nor "half"'),
        ("trainer.in_flight", "half", 'nor "auto"'),
        ("optimizer.lr", -1e-4, "more than 0"),
        ("optimizer.lr", float("nan"), "not a finite number"),
        ("optimizer.lr", "inf", "not a finite number"),
        ("optimizer.weight_decay", -0.1, "at least 0"),
        ("optimizer.eps", 0, "at least 1e-37"),
        ("optimizer.betas", 0.9, "not a list"),
        ("optimizer.betas", [0.9], "two numbers"),
        ("optimizer.betas", [0.9, 1.0], "less than 1"),
        ("optimizer.betas", [0.9, "x"], "'x' is not a number"),
        ("optimizer.name", "adamww", "did you mean adamw?"),
        ("schedule.name", "cosin", "did you mean cosine?"),
        ("schedule.warmup_steps", -1, "at least 0"),
        ("schedule.final_ratio", 1.5, "at most 1"),
        ("trainer.max_steps", 0, "at least 1"),
        ("trainer.max_steps", 1.5, "not a whole number"),
        ("trainer.max_steps", "many", "not a whole number"),
        ("trainer.epochs", 0, "more than 0"),
        ("trainer.max_steps", 1e300, "whole numbers end at 2^63"),
        ("trainer.epochs", 1e300, "1e+300 is out of range; it must be more than 0 and at most 100000"),
        ("trainer.epochs", "inf", "'inf' is not a finite number; it must be more than 0 and at most 100000"),
        ("trainer.epochs", float("nan"), "nan is not a finite number; it must be more than 0 and at most 1"),
        ("trainer.accumulate", 0, "at least 1"),
        ("trainer.seed", -1, "at least 0"),
        ("trainer.clip_norm", -1, "at least 0"),
        ("trainer.eval_every", -1, "at least 0"),
        ("trainer.patience", -1, "at least 0"),
        ("trainer.keep", 0, 'neither a number of checkpoints, at least 1, nor "all"'),
        ("trainer.keep", "some", 'nor "all"'),
        ("trainer.keep", None, "null is not a value"),
        ("trainer.keep", True, 'nor "all"'),
        ("trainer.deterministic", 1, "neither true nor false"),
        ("trainer.objective", "dpoo", "did you mean dpo? there are sft"),
        ("trainer.layout", "pack", "did you mean packed? there are auto, padded"),
        ("trainer.gradient", "checkpointed", "did you mean checkpoint?"),
        ("trainer.samples", "Who?", "not a list"),
        ("data.format", "message", "did you mean messages?"),
        ("data.truncate", "left", "prompt_left, right, drop, error"),
        ("data.train_on", "user", "assistant, last_assistant, all"),
        ("data.max_length", 1, "at least 2"),
        ("data.batch_size", 0, "at least 1"),
        ("data.train", {"pth": "x"}, "it has no 'pth'"),
        ("data.train", {"weight": 2}, "needs a path"),
        ("data.train", [{"path": "x", "weight": 0}], "weight of x: 0.0 is out of range"),
        ("data.train", {"path": "x", "columns": ["a"]}, "columns of x: ['a'] is not a dictionary"),
        ("data.train", 3.5, "not a text"),
        ("data.columns", ["a"], "not a dictionary"),
        ("data.shuffle", "maybe", "neither true nor false"),
        ("model.dtype", "flaot32", "did you mean float32?"),
        ("model.path", 0.5, "not a text"),
        ("head.kind", "chunky", "auto, full, chunked"),
        ("head.chunk", 0, "at least 1"),
        ("adapter.kind", "dorra", "did you mean dora?"),
        ("adapter.rank", 0, "at least 1"),
        ("adapter.alpha", 0, "more than 0"),
        ("adapter.dropout", 1, "less than 1"),
        ("adapter.dropout", -0.1, "at least 0"),
        ("adapter.layers", "first 3", '"last 8"'),
        ("adapter.layers", 0, '"last 8"'),
        ("adapter.layers", True, '"last 8"'),
        ("adapter.targets", "q_proj,,v_proj", "empty name"),
        ("adapter.targets", 3, "not a list of names"),
        ("adapter.targets", [], "empty name"),
        ("adapter.rslora", 3, "neither true nor false"),
        ("adapter.modules_to_save", 3, "not a list of names of modules"),
        ("adapter.modules_to_save", [""], "an empty name of a module; leave the key out to train none whole"),
        ("adapter.init_from", [], "an empty list of folders"),
        ("adapter.init_from", {"a": 1}, "a folder or a list of folders, not a dictionary"),
        ("adapter.init_weights", [1, 0], "a number other than 0"),
        ("adapter.init_weights", ["much"], "'much' is not a number"),
        ("adapter.init_weights", [float("inf")], "not a finite number"),
        ("optimizer.lora_plus_ratio", 0, "more than 0"),
        ("optimizer.decay_vectors", "some", "neither true nor false"),
        ("schedule.decay_share", 0, "more than 0"),
        ("schedule.decay_share", 1.2, "at most 1"),
        ("trainer.neftune_alpha", -1, "at least 0"),
        ("loss.beta", 1e-300, "1e-300 is 0 in the 32 bits"),
        ("optimizer.lr", 1e-39, "is 0 in the 32 bits"),
        ("run.dir", "", "it is empty"),
        ("trainer.seed", -1, "at least 0 and less than 4294967296"),
        ("max_tokens", 0, "at least 1"),
        ("temperature", -1, "at least 0"),
        ("top_p", 0, "more than 0"),
        ("top_p", 1.1, "at most 1"),
    ],
)
def test_a_bad_value_is_refused_with_what_is_wrong(key, given, words):
    with pytest.raises(ValueError) as caught:
        settle(KEYS[key], given)
    assert words in str(caught.value)


def test_every_rule_belongs_to_a_key_and_every_default_passes_its_own():
    named = {key.rule or key.name for schema in SCHEMAS for key in keys_of(schema).values()}
    assert set(RULES) <= named
    for key in KEYS.values():
        if key.default not in (None, "???"):
            assert settle(key, key.default) == key.default
