"""Settings that are each right and exclude each other; files that are not there."""

from dataclasses import fields

import pytest

from mlxft import losses
from mlxft.config import compose, from_dict
from mlxft.config.choices import DPO_VARIANTS, LOSS_KEYS, OPTIMIZERS
from mlxft.config.schema import LossConfig
from mlxft.errors import InputError

MIXED = [{"path": "rows.jsonl", "weight": 2}, {"path": "rows.jsonl"}]
STREAM = {"data__streaming": True, "trainer__max_steps": 5}


@pytest.fixture
def rows(tmp_path, monkeypatch):
    """A folder to be in, with rows.jsonl in it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.jsonl").write_text('{"text": "a"}\n')
    return "rows.jsonl"


def made(rows, **settings):
    """A configuration that is right but for `settings`, keys written with __ for a dot."""
    dotted = {name.replace("__", "."): value for name, value in settings.items()}
    return from_dict({"model.path": "owner/name", "data.train": rows} | dotted)


@pytest.mark.parametrize(
    "settings, key, words",
    [
        ({"schedule__warmup_steps": 10, "trainer__max_steps": 10}, "schedule.warmup_steps", "max_steps=10"),
        ({"adapter__kind": "full", "adapter__dropout": 0.1}, "adapter.dropout", "adapter.kind=full"),
        ({"adapter__kind": "full", "adapter__rank": 8}, "adapter.rank", "adapter.kind=full"),
        ({"adapter__kind": "full", "adapter__alpha": 8}, "adapter.alpha", "adapter.kind=full"),
        ({"adapter__kind": "full", "adapter__layers": 8}, "adapter.layers", "adapter.kind=full"),
        ({"data__format": "tokens", "data__train_on": "all"}, "data.train_on", "by their mask"),
        ({"data__format": "text", "data__train_on": "last_assistant"}, "data.train_on", "no turns"),
        ({"data__revision": "v2"}, "data.revision", "data sets on the hub, and none is named"),
        ({"data__subset": "en"}, "data.subset", "data sets on the hub, and none is named"),
        ({"data__split": "test"}, "data.split", "and of folders, and none is named"),
        ({"data__train": {"path": "rows.jsonl", "weight": 2}}, "data.train", "a weight mixes sets"),
        ({"data__train": MIXED, "data__shuffle": False}, "data.shuffle", "drawn at random"),
        (
            {"data__train": MIXED, "trainer__layout": "packed", "data__batch_tokens": 64},
            "data.batch_tokens",
            "weights cannot be kept to",
        ),
        ({"data__valid": MIXED}, "data.valid", "every row is validated with once"),
        ({"data__buffer": 64}, "data.buffer", "data.streaming=true"),
        ({"data__streaming": True}, "trainer.max_steps", "how many rows a stream has is not known"),
        (STREAM | {"trainer__epochs": 2}, "trainer.epochs", "give trainer.max_steps"),
        (STREAM | {"data__cache": True}, "data.cache", "not kept"),
        (STREAM | {"data__num_workers": 2}, "data.num_workers", "as they are needed"),
        (STREAM | {"data__train": MIXED}, "data.train", "leave weight out"),
        (
            STREAM | {"trainer__layout": "packed", "data__batch_tokens": 64},
            "data.batch_tokens",
            "not known beforehand",
        ),
        (STREAM | {"trainer__objective": "kto"}, "trainer.objective", "which a stream does not have"),
        (STREAM | {"trainer__objective": "dpo"}, "loss.reference_scored", "give every_step"),
        ({"trainer__patience": 3}, "trainer.patience", "data.valid"),
        ({"trainer__segment_layers": 2}, "trainer.segment_layers", "trainer=segmented"),
        ({"trainer__gradient": "whole", "trainer__in_flight": 2}, "trainer.in_flight", "trainer=segmented"),
        ({"trainer__eval_every": 3}, "trainer.eval_every", "data.valid"),
        (
            {"optimizer__name": "adam", "optimizer__weight_decay": 0.1},
            "optimizer.weight_decay",
            "adam has no",
        ),
        ({"optimizer__name": "sgd", "optimizer__betas": [0.9, 0.95]}, "optimizer.betas", "sgd has no betas"),
        ({"optimizer__name": "lion", "optimizer__eps": 1e-6}, "optimizer.eps", "lion has no eps"),
        (
            {"optimizer__name": "lion", "optimizer__bias_correction": False},
            "optimizer.bias_correction",
            "adamw",
        ),
        (
            {"trainer__save_only_adapter": True, "trainer__resume": "auto"},
            "trainer.save_only_adapter",
            "resume",
        ),
        ({"head__kind": "full", "head__chunk": 64}, "head.chunk", "head.kind=full"),
        ({"schedule__name": "constant", "schedule__final_ratio": 0.1}, "schedule.final_ratio", "constant"),
        ({"schedule__decay_share": 0.2}, "schedule.decay_share", "schedule.name=wsd, not cosine"),
        (
            {
                "schedule__name": "wsd",
                "schedule__warmup_steps": 7,
                "schedule__decay_share": 0.4,
                "trainer__max_steps": 10,
            },
            "schedule.warmup_steps",
            "7 steps, and 4 to fall in, are more than 10",
        ),
        ({"adapter__kind": "full", "adapter__rslora": True}, "adapter.rslora", "adapter.kind=full"),
        (
            {"adapter__kind": "full", "adapter__modules_to_save": ["norm"]},
            "adapter.modules_to_save",
            "adapter.kind=full",
        ),
        ({"adapter__rslora": True, "adapter__init_from": "owner/a"}, "adapter.rslora", "taken over as it is"),
        (
            {"adapter__kind": "dora", "adapter__targets": ["q_proj", "model.embed_tokens"]},
            "adapter.targets",
            "DoRA is of linear layers only, not of model.embed_tokens",
        ),
        ({"adapter__init_weights": [1.0]}, "adapter.init_weights", "there is nothing to weigh"),
        (
            {"adapter__init_from": ["a", "b"], "adapter__init_weights": [1.0]},
            "adapter.init_weights",
            "1 weights for the 2 in adapter.init_from",
        ),
        ({"adapter__init_from": ["a", "b"], "adapter__kind": "dora"}, "adapter.init_from", "only LoRA"),
        ({"adapter__init_from": ["a", "b"], "adapter__kind": "full"}, "adapter.init_from", "only LoRA"),
        (
            {"adapter__kind": "full", "optimizer__lora_plus_ratio": 8},
            "optimizer.lora_plus_ratio",
            "has no B to give another rate",
        ),
        ({"optimizer__decay_vectors": False}, "optimizer.decay_vectors", "only matrices are trained"),
        (
            {"adapter__kind": "full", "optimizer__decay_vectors": False, "optimizer__weight_decay": 0},
            "optimizer.decay_vectors",
            "nothing decays",
        ),
        (
            {"adapter__kind": "full", "optimizer__decay_vectors": False, "optimizer__name": "adam"},
            "optimizer.decay_vectors",
            "nothing decays",
        ),
    ],
)
def test_settings_that_exclude_each_other_are_refused(rows, settings, key, words):
    with pytest.raises(InputError) as caught:
        made(rows, **settings)
    assert f"{key}: " in str(caught.value)
    assert words in str(caught.value)
    assert "has a problem" in str(caught.value)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_defaults_of_settings_that_an_optimizer_lacks_are_no_error(rows, name):
    assert made(rows, optimizer__name=name).optimizer.name == name
    assert made(rows, optimizer__name=name, optimizer__weight_decay=0).optimizer.weight_decay == 0


@pytest.mark.parametrize("settings", [{"kind": "full"}, {"kind": "dora"}, {"modules_to_save": ["norm"]}])
def test_vectors_are_kept_from_decaying_where_any_are_trained(rows, settings):
    given = {f"adapter__{name}": value for name, value in settings.items()}
    assert not made(rows, optimizer__decay_vectors=False, **given).optimizer.decay_vectors


@pytest.mark.parametrize("command", ["eval", "generate"])
def test_adapters_are_weighed_by_the_commands_that_use_them(rows, command):
    more = ["data.valid=rows.jsonl"] if command == "eval" else ["prompt=hi"]
    given = ["model.path=owner/name", *more, "adapter.init_from=[a,b]"]
    composed = compose([*given, "adapter.init_weights=[0.5,2]"], command=command)
    assert composed.config.adapter.init_weights == [0.5, 2.0]
    with pytest.raises(InputError, match="adapter.init_weights: 3 weights for the 2"):
        compose([*given, "adapter.init_weights=[1,1,1]"], command=command)


def test_full_training_with_untouched_adapter_settings_is_no_error(rows):
    assert made(rows, adapter__kind="full").adapter.kind == "full"


def test_the_options_of_each_optimizer_are_those_that_mlx_gives_it():
    import inspect

    import mlx.optimizers

    classes = {name.lower(): cls for name, cls in vars(mlx.optimizers).items() if inspect.isclass(cls)}
    for name, options in OPTIMIZERS.items():
        parameters = inspect.signature(classes[name].__init__).parameters
        theirs = {"weight_decay", "betas", "eps", "bias_correction"} & set(parameters)
        if name == "adafactor":
            theirs -= {"eps"}  # a pair of another meaning
        assert options == theirs, name


@pytest.mark.parametrize(
    "key, value",
    [
        ("data.train", "./nowhere.jsonl"),
        ("data.train", ["rows.jsonl", "nowhere.jsonl"]),
        ("data.train", [{"path": "nowhere.jsonl", "weight": 2}, "rows.jsonl"]),
        ("data.valid", "data/nowhere.jsonl"),
        ("data.valid", "nowhere.jsonl"),
        ("data.train", "bundled:nowhere.jsonl"),
        ("model.path", "./nowhere"),
        ("adapter.init_from", "./nowhere"),
        ("trainer.resume", "./nowhere"),
    ],
)
def test_a_file_that_is_not_there_is_named_with_its_key(rows, key, value):
    with pytest.raises(InputError) as caught:
        from_dict({"model.path": "owner/name", "data.train": rows} | {key: value})
    assert f"{key}: " in str(caught.value)
    assert "nowhere" in str(caught.value)


def test_a_reference_that_is_not_there_is_named_with_its_key(rows):
    with pytest.raises(InputError, match=r"loss\.reference: there is no \./nowhere"):
        made(rows, trainer__objective="dpo", loss__reference="./nowhere")


def test_a_hub_id_is_not_looked_for_on_the_disk(rows):
    assert made(rows).model.path == "owner/name"


@pytest.mark.parametrize(
    "overrides, words",
    [
        (["trainer=dpo", "data.format=messages"], "dpo trains on rows of the format preference"),
        (["trainer=kto", "data.format=preference"], "kto trains on rows of the format unpaired"),
        (["data.format=preference"], "preference rows are for trainer.objective=dpo, orpo, cpo, simpo"),
        (["trainer=prefix_shared"], "the rows of sft share no prompts; use packed"),
        (["trainer=orpo", "data.train_on=all"], "orpo trains on the answers"),
        (["trainer=[dpo,packed]", "data.batch_tokens=512"], "a micro-batch of dpo is so many pairs"),
        (["data.valid=rows.jsonl", "trainer.patience=2"], "give trainer.eval_every"),
        (["trainer.min_delta=0.1"], "it needs validation data"),
        (["adapter.targets=[]"], "an empty name of a layer"),
        (["data.batch_tokens=512"], "only packed rows fill a number of tokens"),
        (["trainer=packed", "data.batch_tokens=512", "data.batch_size=8"], "leave one of them out"),
        (["loss.beta=0.2"], "sft does not use it"),
        (["trainer=orpo", "loss.gamma=1"], "orpo does not use it (it is for simpo)"),
        (["trainer=cpo", "loss.reference=start"], "cpo does not use it (it is for dpo, kto)"),
        (["trainer=dpo", "loss.label_smoothing=0.1"], "loss.variant=sigmoid has no use for it"),
        (["trainer=dpo", "loss.variant=cdpo"], "without it loss.variant=cdpo is sigmoid"),
        (["trainer=dpo", "loss.variant=exo_pair"], "divides by it"),
    ],
)
def test_what_an_objective_has_no_use_for_is_refused(overrides, words, rows):
    with pytest.raises(InputError) as caught:
        compose(["model.path=owner/name", "data.train=rows.jsonl", *overrides])
    assert words in str(caught.value)


def test_the_keys_that_an_objective_reads_are_known_keys():
    assert set().union(*LOSS_KEYS.values()) == {field.name for field in fields(LossConfig)}


def test_the_variants_of_the_configuration_are_those_of_the_loss():
    assert set(DPO_VARIANTS) == set(losses.DPO_VARIANTS)


def test_a_data_set_on_the_hub_is_not_looked_for_on_the_disk(rows):
    config = made("owner/rows", data__split="train[:10%]", data__revision="v2", data__subset="en")
    assert config.data.train == "owner/rows"


def test_sets_with_weights_are_typed_as_lists_of_keys(rows):
    typed = "data.train=[{path:rows.jsonl,weight:2},{path:owner/rows,split:test,columns:{prompt:q}}]"
    assert compose(["model.path=owner/name", typed]).config.data.train == [
        {"path": "rows.jsonl", "weight": 2.0},
        {"path": "owner/rows", "split": "test", "columns": {"prompt": "q"}},
    ]
