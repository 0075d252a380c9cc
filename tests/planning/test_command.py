"""`mlxft plan` as a person and a program read it."""

import json
import shutil

import pytest

from mlxft import cli
from tests.runs import write_rows, write_token_rows
from tests.tiny_models import make_model


def plan(model, data, *overrides):
    return cli.main(["plan", f"model.path={model}", f"data.train={data}", "data.format=tokens", *overrides])


def test_the_table_is_plain_text_in_a_pipe(model, data, capsys):
    assert plan(model, data) == 0
    output = capsys.readouterr().out
    assert "\x1b" not in output and output.isascii()
    assert max(map(len, output.splitlines())) <= 120
    names = ("parameters", "weights", "adapter", "gradients", "optimiser", "head", "memory limit")
    for name in (*names, "longest batch", "median batch"):
        assert f"\n{name} " in output
    for backward in (
        "whole",
        "checkpoint",
        "segmented, 1/2 layer",
        "segmented, 1 layer",
        "segmented, 2 layers",
        "segmented, 4 layers",
    ):
        assert f"\n{backward} " in output
    assert "trainer.gradient=auto takes: whole" in output
    assert "(delete it to measure again)" in " ".join(output.split())
    assert "0.00 GB" not in output


def test_json_has_sizes_that_add_up(model, data, capsys):
    """Adam keeps two arrays for each that is trained, and a few numbers."""
    assert plan(model, data, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["trained_parameters"] * 4 == found["adapter_bytes"] == found["gradients_bytes"]
    assert found["parameters"] * 4 == found["weights_bytes"] + found["adapter_bytes"]
    assert 0 <= found["optimizer_bytes"] - 2 * found["adapter_bytes"] < 100
    assert found["longest"] == {
        "rows": 2,
        "length": 160,
        "targets": 160,
        "batch_size": 2,
        "max_length": 161,
    }
    assert all(each["fits_max_length"] == each["fits_length"] + 1 for each in found["plans"])
    assert [each["kind"] for each in found["plans"]] == ["whole", "checkpoint"] + ["segmented"] * 4
    assert [each["halves"] for each in found["plans"]] == [False, False, True, False, False, False]
    assert found["taken"]["kind"] == "whole"


def test_no_weight_is_read(model, data, tmp_path, capsys):
    """A checkpoint of the same header whose numbers are all not a number gives the same sizes."""
    assert plan(model, data, "--json") == 0
    expected = json.loads(capsys.readouterr().out)
    other = make_model(
        tmp_path / "model", "qwen3", hidden_size=64, intermediate_size=192, num_hidden_layers=8
    )
    file = other / "model.safetensors"
    content = file.read_bytes()
    start = 8 + int.from_bytes(content[:8], "little")
    file.write_bytes(content[:start] + b"\xff" * (len(content) - start))
    assert plan(other, data, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    same = ("parameters", "weights_bytes", "optimizer_bytes", "longest", "bound_bytes")
    assert [found[name] for name in same] == [expected[name] for name in same]


def test_the_median_batch_is_no_larger_than_the_longest(not_probed, tmp_path, capsys):
    data = write_token_rows(tmp_path / "rows.jsonl", [20, 30, 40, 50, 60])
    assert plan(not_probed, data, "--json", "data.batch_size=1") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["longest"]["length"] == 59 and found["median"]["length"] == 39


def test_wrong_input_ends_as_it_does_in_training(model, data, capsys):
    assert plan(model, data, "adapter.rnk=4") == 2
    assert "did you mean adapter.rank?" in capsys.readouterr().err
    assert plan(model, data, "trainer.memory_limit=none") == 2
    assert "trainer.memory_limit: 'none' is neither a number of GB" in capsys.readouterr().err


def test_a_model_that_is_not_here_is_not_fetched(data, capsys, monkeypatch):
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    assert plan("nobody/has-this-model", data) == 2
    said = capsys.readouterr().err
    assert "nobody/has-this-model is not on this machine, and a plan fetches nothing" in said


@pytest.mark.parametrize("family", ["gemma4_text", "gemma2"])
def test_families_that_cannot_be_probed_get_a_bound(family, data, tmp_path, capsys):
    model = make_model(tmp_path / "model", family)
    assert plan(model, data) == 0
    assert "trainer.gradient=auto takes: whole; peak less than" in capsys.readouterr().out


@pytest.mark.parametrize(
    "more, longest",
    [
        (["data.batch_size=2"], {"rows": 2, "length": 89, "targets": 80, "batch_size": 2, "max_length": 90}),
        # 89 positions of the longest and 5 rows of 19: no batch of ten rows of 19 is smaller than 190.
        (
            ["trainer.layout=packed", "data.batch_tokens=200"],
            {"rows": 10, "length": 19, "targets": 100, "batch_size": 10, "max_length": 20},
        ),
    ],
)
def test_of_a_large_set_only_the_first_rows_are_read(model, tmp_path, capsys, more, longest):
    """The last row is wrong and never seen; the longest is taken to be as long as it may be."""
    row = json.dumps({"input_ids": [5] * 20, "completion_mask": [0] * 10 + [1] * 10})
    large = tmp_path / "large.jsonl"
    large.write_text(f"{row}\n" * 60_000 + "no row\n")
    assert plan(model, large, "data.max_length=90", "--json", *more) == 0
    output = capsys.readouterr()
    found = json.loads(output.out)
    assert found["longest"] == longest
    assert "the longest is taken to have data.max_length=90 tokens" in output.err


@pytest.mark.parametrize(
    "name, text, words",
    [
        ("config.json", "{", "config.json:1: not valid JSON"),
        ("config.json", "[]", "config.json: expected an object"),
        ("generation_config.json", "[]", "generation_config.json: expected an object"),
    ],
)
@pytest.mark.parametrize("command", ["plan", "preview", "train"])
def test_a_damaged_file_of_the_model_is_called_by_its_name(
    command, name, text, words, not_probed, here, capsys
):
    shutil.copytree(not_probed, here / "model")
    (here / "model" / name).write_text(text)
    write_rows(here / "rows.jsonl", [{"text": "a"}])
    assert cli.main([command, "model.path=./model", "data.train=rows.jsonl"]) == 2
    said = capsys.readouterr().err
    assert words in said and "tokenizer" not in said


def test_it_says_at_once_that_it_measures(model, data, here, monkeypatch, capsys):
    monkeypatch.setenv("XDG_CACHE_HOME", str(here))
    assert plan(model, data) == 0
    lines = capsys.readouterr().err.splitlines()
    begun = lines.index("measuring what a layer takes in memory and time, once for this machine and model")
    assert lines[begun + 1].startswith("a layer's memory and time, measured in")
    assert plan(model, data) == 0
    assert "measur" not in capsys.readouterr().err
