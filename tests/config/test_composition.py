"""The whole configuration: from Python, per command, and as YAML."""

from dataclasses import asdict

import pytest
import yaml

from mlxft.config import Config, compose, from_dict, to_yaml
from mlxft.errors import InputError


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """A folder to be in, with rows.jsonl in it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.jsonl").write_text('{"text": "a"}\n')
    return tmp_path


GOOD = {"model": {"path": "owner/name"}, "data": {"train": "rows.jsonl"}}


def refusal(values):
    with pytest.raises(InputError) as caught:
        from_dict(values)
    return str(caught.value)


def test_without_more_every_key_has_its_default():
    made = from_dict(GOOD)
    expected = Config()
    expected.model.path, expected.data.train = "owner/name", "rows.jsonl"
    assert made == expected
    assert compose(["model.path=owner/name", "data.train=rows.jsonl"]).config == expected


def test_a_dictionary_may_be_nested_or_dotted():
    nested = from_dict(GOOD | {"optimizer": {"lr": 2}})
    assert from_dict({"model.path": "owner/name", "data.train": "rows.jsonl", "optimizer.lr": 2}) == nested
    assert nested.optimizer.lr == 2.0


def test_a_dictionary_is_checked_like_a_command_line():
    values = GOOD | {"trainer": {"lrr": 1, "keep": 0}, "optimizer": {"lr": "fast"}, "lora_r": 8}
    from_python = refusal(values)
    with pytest.raises(InputError) as caught:
        compose(
            [
                "model.path=owner/name",
                "data.train=rows.jsonl",
                "trainer.lrr=1",
                "trainer.keep=0",
                "optimizer.lr=fast",
                "lora_r=8",
            ]
        )
    assert sorted(from_python.splitlines()) == sorted(str(caught.value).splitlines())
    assert "4 problems" in from_python


def test_a_leftover_recipe_key_is_refused():
    assert "recipe: this is no key" in refusal(GOOD | {"recipe": "quickstart"})


def test_what_must_be_given_is_named_with_an_example():
    text = refusal({})
    assert "model.path: it is missing" in text
    assert "data.train: it is missing" in text
    assert "data.train: it is missing" in refusal({"model.path": "owner/name", "data.train": []})


def test_a_config_is_checked_as_well():
    config = from_dict(GOOD)
    assert from_dict(config) == config
    config.trainer.accumulate = 0
    assert "trainer.accumulate: 0 is out of range" in refusal(config)


def test_yaml_reads_back_to_the_same_configuration():
    config = from_dict(
        GOOD
        | {
            "optimizer": {"eps": 1e-12, "lr": 3e-5},
            "data": {"train": ["rows.jsonl"], "columns": {"prompt": "Fräge"}},
            "trainer": {"samples": ["Who?"]},
        }
    )
    assert from_dict(yaml.safe_load(to_yaml(config))) == config


def test_a_checked_configuration_is_made_of_plain_values():
    values = asdict(compose(["model.path=owner/name", "data.train=[rows.jsonl]"]).config)
    assert type(values["data"]["train"]) is list
    assert type(values["optimizer"]["betas"]) is list


def test_the_configurations_of_two_calls_share_nothing():
    first = compose(["model.path=owner/name", "data.train=rows.jsonl"]).config
    first.optimizer.betas.append(3)
    assert compose(["model.path=owner/name", "data.train=rows.jsonl"]).config.optimizer.betas == [0.9, 0.999]


def test_eval_wants_a_model_and_a_file_and_refuses_what_it_does_not_use():
    made = compose(["model.path=owner/name", "data.valid=rows.jsonl"], command="eval").config
    assert made.data.valid == "rows.jsonl"
    with pytest.raises(InputError) as caught:
        compose(
            ["model.path=owner/name", "optimizer.lr=1", "trainer=checkpoint", "data.shuffle=false"],
            command="eval",
        )
    text = str(caught.value)
    assert "data.valid or data.train or eval.tasks: it is missing" in text
    assert "optimizer.lr: mlxft eval does not use it" in text
    assert "trainer: mlxft eval does not use it" in text
    assert "data.shuffle: mlxft eval does not use it" in text


def test_generate_has_keys_of_its_own():
    made = compose(["model.path=owner/name", "prompt=Who are you?", "temperature=0.5"], command="generate")
    assert made.own.prompt == "Who are you?"
    assert (made.own.temperature, made.own.max_tokens, made.own.system) == (0.5, 256, None)
    with pytest.raises(InputError) as caught:
        compose(
            ["model.path=owner/name", "tempreature=0.5", "max_tokens=0", "trainer.seed=1"], command="generate"
        )
    text = str(caught.value)
    assert "tempreature: there is no such key; did you mean temperature?" in text
    assert "max_tokens: 0 is out of range" in text
    assert "prompt: it is missing" in text
    assert "trainer.seed: mlxft generate does not use it" in text


def test_generate_takes_the_model_of_a_recipe(folder):
    (folder / "recipes").mkdir()
    (folder / "recipes" / "own.yaml").write_text("model: {path: owner/name}\ntrainer: {eval_every: 5}\n")
    made = compose(["+recipe=own", "prompt=Hi"], command="generate")
    assert (made.recipe, made.config.model.path) == ("own", "owner/name")
