"""The list of keys in --help."""

from mlxft.config.keys import keys_of
from mlxft.config.reference import evaluation_keys, generation_keys, preview_keys, training_keys
from mlxft.config.schema import Config, EvalKeys, GenerateConfig, PreviewKeys


def test_help_lists_every_key_with_its_default_and_what_it_is():
    lines = [line.split(maxsplit=1) for line in training_keys().splitlines() if line]
    lines += [line.split(maxsplit=1) for line in evaluation_keys().splitlines()]
    lines += [line.split(maxsplit=1) for line in preview_keys().splitlines()]
    lines += [line.split(maxsplit=1) for line in generation_keys().splitlines()]
    assert [line[0].partition("=")[0] for line in lines] == list(
        keys_of(Config, EvalKeys, PreviewKeys, GenerateConfig)
    )
    assert all(len(line) == 2 for line in lines), "a key without a word on what it is"
    assert "optimizer.betas=[0.9,0.999]" in training_keys(("optimizer", "model.path"))
    assert "model.dtype" not in training_keys(("optimizer", "model.path"))
