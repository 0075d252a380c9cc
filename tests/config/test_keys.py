"""Names of keys: flat and nested, distances between them, and what a wrong one was meant to be."""

import pytest

from mlxft.config.keys import edit_distance, flatten, keys_of, nearest, nearest_key, nest, unknown_key
from mlxft.config.schema import Config, EvalKeys, GenerateConfig, PreviewKeys
from mlxft.errors import InputError

KEYS = keys_of(Config, EvalKeys, PreviewKeys, GenerateConfig)


@pytest.mark.parametrize(
    "a, b, expected",
    [("lr", "lr", 0), ("lrr", "lr", 1), ("", "abc", 3), ("kitten", "sitting", 3), ("rank", "bank", 1)],
)
def test_edit_distance_counts_letters_inserted_dropped_or_changed(a, b, expected):
    assert edit_distance(a, b) == expected
    assert edit_distance(b, a) == expected


@pytest.mark.parametrize(
    "wrong, meant",
    [
        ("trainer.lrr", "optimizer.lr"),  # one letter, in another group: nothing in trainer is as near
        ("trainer.max_step", "trainer.max_steps"),
        ("optimiser.lr", "optimizer.lr"),
        ("trainer.batch_size", "data.batch_size"),
        ("batchsize", "data.batch_size"),
        ("modl.path", "model.path"),
        ("data.max_lenght", "data.max_length"),
        ("temprature", "temperature"),
        ("completely.different_thing", None),
    ],
)
def test_a_mistyped_key_is_taken_for_the_nearest(wrong, meant):
    assert nearest_key(wrong, KEYS) == meant


def test_a_word_far_from_all_has_no_nearest():
    assert nearest("adamww", ["adamw", "lion"]) == "adamw"
    assert nearest("zzzz", ["adamw", "lion"]) is None
    assert nearest("x", []) is None


def test_dotted_and_nested_names_come_to_the_same():
    nested = {"optimizer": {"lr": 1, "eps": 2}, "trainer": {"seed": 3}}
    assert nest({"optimizer.lr": 1, "optimizer": {"eps": 2}, "trainer.seed": 3}) == nested
    assert nest({"optimizer": {"lr": 1}, "optimizer.eps": 2, "trainer": {"seed": 3}}) == nested
    assert flatten(nested, KEYS) == {"optimizer.lr": 1, "optimizer.eps": 2, "trainer.seed": 3}


def test_a_key_that_is_given_dotted_and_nested_is_refused_by_name():
    for doubled in (
        {"optimizer.lr": 1, "optimizer": {"lr": 2}},
        {"optimizer": {"eps": 1, "lr": 2}, "optimizer.lr": 1},
        {"optimizer": {"lr.a": 2}, "optimizer.lr": 1},
    ):
        with pytest.raises(InputError, match=r"optimizer\.lr: it is set twice"):
            nest(doubled)
    assert nest({"optimizer": None, "optimizer.lr": 1}) == {"optimizer": {"lr": 1}}


def test_flattening_keeps_a_dictionary_that_is_a_value_and_every_unknown_name():
    values = {
        "data": {"columns": {"prompt": "q"}},
        "foo": {"bar": 1},
        "empty": {},
        "trainer": 3,
        "model": None,
    }
    assert flatten(values, KEYS) == {
        "data.columns": {"prompt": "q"},
        "foo.bar": 1,
        "empty": {},
        "trainer": 3,
    }


@pytest.mark.parametrize(
    "theirs, ours",
    [
        ("learning_rate", "optimizer.lr"),
        ("trainer.learning_rate", "optimizer.lr"),
        ("learning-rate", "optimizer.lr"),
        ("iters", "trainer.max_steps"),
        ("max_iters", "trainer.max_steps"),
        ("num_train_epochs", "trainer.epochs"),
        ("per_device_train_batch_size", "data.batch_size"),
        ("gradient_accumulation_steps", "trainer.accumulate"),
        ("lora_r", "adapter.rank"),
        ("r", "adapter.rank"),
        ("lora_rank", "adapter.rank"),
        ("lora_parameters.rank", "adapter.rank"),
        ("lora_alpha", "adapter.alpha"),
        ("num_layers", "adapter.layers"),
        ("max_seq_length", "data.max_length"),
        ("sequence_len", "data.max_length"),
        ("grad_checkpoint", "trainer.gradient=checkpoint"),
        ("use_gradient_checkpointing", "trainer.gradient=checkpoint"),
        ("mask_prompt", "data.train_on"),
        ("train_on_inputs", "data.train_on"),
        ("adapter_path", "run.dir"),
        ("save_steps", "trainer.save_every"),
        ("steps_per_eval", "trainer.eval_every"),
        ("max_grad_norm", "trainer.clip_norm"),
        ("lr_scheduler_type", "schedule.name"),
        ("target_modules", "adapter.targets"),
        ("base_model", "model.path"),
        ("max_new_tokens", "max_tokens"),
    ],
)
def test_the_names_of_other_tools_lead_to_ours(theirs, ours):
    assert ours in unknown_key(theirs, KEYS)


def test_every_key_that_a_name_of_other_tools_leads_to_exists():
    from mlxft.config.aliases import ALIASES

    leading = {text.split(",")[0].split(";")[0].split("=")[0].split(" ")[0] for text in ALIASES.values()}
    assert leading - set(KEYS) == {"always", "the"}  # two sentences that name no key first
    assert not set(ALIASES) & set(KEYS)


def test_a_group_is_not_a_key_and_its_keys_are_listed():
    assert "optimizer has name, lr" in unknown_key("optimizer", KEYS)
    assert "+recipe=NAME" in unknown_key("recpe", KEYS)


@pytest.mark.parametrize(
    "wrong, meant",
    [("modle", "model"), ("optimiser", "optimizer"), ("trainr", "trainer"), ("adaptor", "adapter"),
     ("promt", "prompt"), ("temprature", "temperature"), ("batchsize", "data.batch_size")],
)  # fmt: skip
def test_a_mistyped_group_is_taken_for_the_nearest(wrong, meant):
    assert meant in unknown_key(wrong, KEYS).removesuffix("?").split()
