"""Arguments of the command line, one by one."""

import pytest

from mlxft.config import compose
from mlxft.config.overrides import group_files
from mlxft.errors import InputError


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """A folder to be in, with two files of rows."""
    monkeypatch.chdir(tmp_path)
    for name in ("a.jsonl", "b.jsonl"):
        (tmp_path / name).write_text('{"text": "a"}\n')
    return tmp_path


def config(*overrides):
    return compose(["model.path=owner/name", "data.train=a.jsonl", *overrides]).config


def message(*overrides):
    with pytest.raises(InputError) as caught:
        config(*overrides)
    return str(caught.value)


@pytest.mark.parametrize("sign", ["", "+", "++"])
def test_a_mistyped_key_is_refused_with_any_sign_before_it(sign):
    text = message(f"{sign}trainer.lrr=1")
    assert text == (
        "the configuration has a problem:\n  trainer.lrr: there is no such key; did you mean optimizer.lr?"
    )


@pytest.mark.parametrize("sign", ["", "+", "++"])
def test_a_right_key_is_taken_with_any_sign_before_it(sign):
    assert config(f"{sign}optimizer.lr=3e-4").optimizer.lr == 3e-4


def test_hydras_advice_on_wrong_keys_never_appears():
    text = message(
        "trainer.lrr=1", "foo=1", "optimizer=nope", "+recipe=nope", "hydra.run.dir=x", "trainer@x=sft"
    )
    for advice in ("+trainer.lrr", "append", "use +", "++", "struct", "https://"):
        assert advice not in text


def test_every_problem_is_told_at_once():
    text = message(
        "trainer.lrr=1", "optimizer.lr=fast", "trainer.keep=0", "adapter.kind=full", "adapter.rank=8"
    )
    assert text.startswith("the configuration has 4 problems:")
    for key in ("trainer.lrr", "optimizer.lr", "trainer.keep", "adapter.rank"):
        assert f"\n  {key}: " in text


@pytest.mark.parametrize(
    "argument, words",
    [
        ("quickstart_", "this is not KEY=VALUE"),
        ("settings.yaml", "+recipe=settings"),
        ("--learning-rate", "settings are written KEY=VALUE: optimizer.lr=..."),
        ("--seed=3", "trainer.seed=..."),
        ("-m", "several runs at once are for training"),
        ("+sweep=lr_grid", "sweeps are run with -m"),
        ("~trainer.seed", "can't be removed"),
        ("~trainer.seed=1", "can't be removed"),
        ("trainer.seed=", "trainer.seed: the value after = is missing"),
        ("run.dir=a(b", "run.dir: a(b can't be read"),
        ("run.dir=a(b", "'run.dir=\"a(b\"'"),
        ("model.path=${a.b", "not an interpolation"),
        ("model.path=${trainer.nope}", "'${trainer.nope}' leads nowhere"),
        ("trainer.max_steps=1,2", "1,2 means several values"),
        ("data.train=a.jsonl,b.jsonl", "for a list write data.train=[a.jsonl,b.jsonl]"),
        ("optimizer.lr=range(1,3)", "several values"),
        ("data=a.jsonl", "data has train, valid"),
        ("optimizer=adamww", "did you mean adamw?"),
        ("optimizer={name:lion}", "is no file of configs/optimizer"),
        ("trainer=[whole,checkpoint]", "whole and checkpoint both set trainer.gradient"),
        ("optimizer=[adamw,lion]", "adamw and lion both set optimizer.name"),
        ("hydra.run.dir=x", "did you mean run.dir?"),
        ("prompt=Hello", "there is no such key"),
        ("adapter.init_from=???", "adapter.init_from: it is empty"),
        ('data.valid=""', "data.valid: it is empty"),
        ("run.dir=''", "run.dir: it is empty"),
        ("adapter.rank=???", "adapter.rank: it is empty"),
        ("trainer.samples=???", "trainer.samples: it is empty"),
    ],
)
def test_an_argument_that_cannot_be_is_explained(argument, words):
    assert words in message(argument)


def test_each_file_of_trainer_sets_only_its_own_axis():
    plain = config().trainer
    assert config("trainer=checkpoint").trainer.gradient == "checkpoint"
    chosen = config("trainer=[sft,padded,checkpoint]").trainer
    assert (chosen.objective, chosen.layout, chosen.gradient) == ("sft", "padded", "checkpoint")
    chosen.gradient, chosen.layout = plain.gradient, plain.layout
    assert chosen == plain


def test_files_of_one_group_given_one_by_one_come_together():
    assert config("trainer=sft", "trainer=whole", "trainer=padded").trainer.gradient == "whole"


@pytest.mark.parametrize("name", group_files()["sweep"])
def test_every_file_of_a_sweep_composes(name):
    assert compose([f"+sweep={name}"], "sweep").own.sweep.params


@pytest.mark.parametrize(
    "group, name", [(g, n) for g, names in group_files().items() for n in names if g != "sweep"]
)
def test_every_file_in_configs_composes(group, name):
    overrides = [f"{group}={name}"] if group == "model" else ["model.path=owner/name", f"{group}={name}"]
    if name == "prefix_shared":  # which needs prompts to share
        overrides.append("trainer=dpo")
    composed = compose(["data.train=a.jsonl", *overrides]).config
    if group in ("optimizer", "schedule"):
        assert getattr(composed, group).name == name
    if group in ("adapter", "head"):
        assert getattr(composed, group).kind == name


def test_a_single_key_wins_over_a_file_of_its_group_in_any_order():
    assert config("optimizer.lr=2", "optimizer=lion").optimizer.lr == 2
    assert config("trainer.gradient=whole", "trainer=checkpoint").trainer.gradient == "whole"


def test_the_last_of_two_values_counts():
    assert config("optimizer.lr=2", "optimizer.lr=3").optimizer.lr == 3


def test_a_model_may_be_given_as_its_path():
    assert compose(["model=owner/other", "data.train=a.jsonl"]).config.model.path == "owner/other"
    assert compose(["model=./", "data.train=a.jsonl"]).config.model.path == "./"


def test_a_revision_of_digits_stays_as_typed():
    assert config("model.revision=12345e7").model.revision == "12345e7"
    assert config("model.revision=0012").model.revision == "0012"


def test_lists_dictionaries_and_interpolations_are_read():
    made = config(
        "data.train=[a.jsonl,b.jsonl]",
        "data.columns.prompt=question",
        "adapter.targets=q_proj,v_proj",
        "trainer.max_steps=50",
        "trainer.eval_every=${trainer.max_steps}",
        "data.valid=b.jsonl",
        'trainer.samples=["Who are you?"]',
    )
    assert made.data.train == ["a.jsonl", "b.jsonl"]
    assert made.data.columns == {"prompt": "question"}
    assert made.adapter.targets == ["q_proj", "v_proj"]
    assert made.trainer.eval_every == 50
    assert made.trainer.samples == ["Who are you?"]


@pytest.mark.parametrize(
    "prompt",
    [
        "Hello, who are you? {really} (yes)",
        "a=b",
        "${not.an.interpolation}",
        "it's",
        'say "hi" to me',
        " two\nlines ",
    ],
)
def test_a_prompt_is_taken_as_typed(prompt):
    composed = compose(["model.path=owner/name", f"prompt={prompt}", "max_tokens=3"], command="generate")
    assert composed.own.prompt == prompt
    assert composed.own.max_tokens == 3
