"""`mlxft export` as a person runs it: from a run's adapter, with card and manifest, refusing what it must."""

import hashlib
import json

import mlx.core as mx
import pytest
import yaml

from mlxft.cli import main
from mlxft.config import compose
from mlxft.errors import InputError
from mlxft.evaluation.adapted import load_adapted
from mlxft.models.fingerprint import weights_fingerprint
from tests.export.made import adapter, export
from tests.runs import train, write_token_rows
from tests.tiny_models import make_model


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run of two steps, and what it was made of."""
    root = tmp_path_factory.mktemp("run")
    base = make_model(root / "base", "llama", num_hidden_layers=2)
    (base / "README.md").write_text("---\nlicense: apache-2.0\n---\n# A base\n")
    rows = write_token_rows(root / "rows.jsonl", [12, 9])
    train(base, rows, root / "run", "adapter.rank=2", "trainer.max_steps=2", "optimizer.lr=1e-2")
    return root


def manifest_of(folder, name="manifest.json"):
    return json.loads((folder / name).read_text())


def test_an_adapter_is_exported_without_naming_its_model(run, tmp_path, capsys):
    code = main(["export", f"adapter.init_from={run}/run/adapter", "to=merged", f"out={tmp_path / 'm'}"])
    printed = capsys.readouterr().out
    assert code == 0
    assert f"model: {run / 'base'}" in printed and f"out: {tmp_path / 'm'}" in printed
    assert "LoRA of rank 2, scale 2 on 14 layers" in printed
    assert "logits: at 192 positions they differ by" in printed


def test_json_says_the_same_for_programs(run, tmp_path, capsys):
    out = tmp_path / "peft"
    main(["export", "--json", f"adapter.init_from={run}/run/adapter", "to=peft", f"out={out}"])
    said = json.loads(capsys.readouterr().out)
    assert said["out"] == str(out) and said["to"] == "peft" and said["hub"] is None
    assert said["logits"]["difference"] <= 1e-5


def test_the_manifest_says_of_what_the_export_was_made(run, tmp_path):
    export(f"adapter.init_from={run}/run/adapter", to="merged", out=tmp_path / "m")
    manifest = manifest_of(tmp_path / "m")
    assert manifest["base"] == {
        "path": str(run / "base"), "revision": None, "weights": weights_fingerprint(run / "base"),
    }  # fmt: skip
    [trained] = manifest["adapters"]
    config = (run / "run" / "config.yaml").read_bytes()
    assert trained["trained"]["config"] == hashlib.sha256(config).hexdigest()
    weights = (run / "run" / "adapter" / "adapters.safetensors").read_bytes()
    assert trained["files"]["adapters.safetensors"] == hashlib.sha256(weights).hexdigest()
    assert set(trained["trained"]["data"]) == {"train", "valid"}


def test_the_model_card_says_base_licence_data_training_and_figures(run, tmp_path):
    export(f"adapter.init_from={run}/run/adapter", to="merged", out=tmp_path / "m")
    _, head, body = (tmp_path / "m" / "README.md").read_text().split("---\n", 2)
    head = yaml.safe_load(head)
    assert (head["license"], head["library_name"]) == ("apache-2.0", "transformers")
    summary = json.loads((run / "run" / "summary.json").read_text())
    for said in ("`rows.jsonl`", "adamw, learning rate 0.01", "steps 2", f"last loss {summary['loss']:.6g}",
                 "LoRA of rank 2", "mlx_lm.generate --model m", "version of `base`,"):  # fmt: skip
        assert said in body
    assert str(run) not in body


def test_a_base_and_data_on_the_hub_are_linked_in_the_card(run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "owner").mkdir()
    (tmp_path / "owner" / "name").symlink_to(run / "base")
    export(f"adapter.init_from={run}/run/adapter", "model.path=owner/name", to="peft", out=tmp_path / "p")
    head = yaml.safe_load((tmp_path / "p" / "README.md").read_text().split("---\n", 2)[1])
    assert (head["base_model"], head["base_model_relation"]) == ("owner/name", "adapter")
    config = json.loads((tmp_path / "p" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == "owner/name"


@pytest.fixture(scope="module")
def other(run):
    return make_model(run / "other", "llama", seed=1, num_hidden_layers=2)


def test_an_adapter_of_other_weights_is_refused_wherever_it_is_used(run, other, tmp_path):
    given = (f"model.path={other}", f"adapter.init_from={run}/run/adapter")
    refused = f"was trained on {run / 'base'}, and the weights in {other} are others"
    with pytest.raises(InputError, match=refused):
        export(*given, to="merged", out=tmp_path / "m")
    with pytest.raises(InputError, match=refused):
        load_adapted(compose([*given, "prompt=a"], command="generate").config, other)
    with pytest.raises(InputError, match=refused):
        train(other, run / "rows.jsonl", tmp_path / "run", f"adapter.init_from={run}/run/adapter")
    assert not list(tmp_path.iterdir())


def test_an_adapter_of_other_weights_is_exported_where_that_is_meant(run, other, tmp_path):
    done = export(f"model.path={other}", f"adapter.init_from={run}/run/adapter", "adapter.any_base=true",
                  to="merged", out=tmp_path / "m")  # fmt: skip
    assert done.record["base"]["path"] == str(other)


def test_a_copy_of_the_base_in_other_files_is_the_same_base(run, tmp_path):
    weights = mx.load(str(run / "base" / "model.safetensors"))
    copy = tmp_path / "copy"
    copy.mkdir()
    for file in (run / "base").glob("*.json*"):
        (copy / file.name).write_bytes(file.read_bytes())
    names = sorted(weights)
    for number, part in enumerate((names[:5], names[5:]), 1):
        mx.save_safetensors(str(copy / f"model-{number}.safetensors"), {name: weights[name] for name in part})
    assert weights_fingerprint(copy) == weights_fingerprint(run / "base")
    export(f"model.path={copy}", f"adapter.init_from={run}/run/adapter", to="peft", out=tmp_path / "p")


def test_an_exported_peft_adapter_knows_its_base_too(run, other, tmp_path):
    export(f"adapter.init_from={run}/run/adapter", to="peft", out=tmp_path / "p")
    with pytest.raises(InputError, match="the weights in .* are others"):
        export(f"model.path={other}", f"adapter.init_from={tmp_path / 'p'}", to="merged", out=tmp_path / "m")


def test_a_folder_that_is_not_empty_is_left_as_it_was(run, tmp_path, capsys):
    (tmp_path / "theirs").write_text("theirs")
    code = main(["export", f"adapter.init_from={run}/run/adapter", "to=peft", f"out={tmp_path}"])
    assert code == 2 and "is not empty: it holds theirs" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["theirs"]


def test_rows_of_ones_own_are_compared_on(run, tmp_path):
    rows = (f"data.valid={run / 'rows.jsonl'}", "data.format=tokens")
    done = export(f"adapter.init_from={run}/run/adapter", *rows, to="peft", out=tmp_path / "p")
    assert done.record["logits"]["positions"] == 12 + 9


@pytest.mark.parametrize("keys, message", [
    ({"to": "pefd"}, "'pefd' is not known; did you mean peft?"),
    ({"to": "peft", "dtype": "float32"}, "dtype is of to=merged and to=gguf, not of to=peft"),
    ({"to": "merged", "gguf": "adapter"}, "gguf is of to=gguf, not of to=merged"),
    ({"to": "gguf", "quantization": "none"}, "quantization is of to=merged, not of to=gguf"),
    ({"to": "peft", "hub": "name"}, "'name' is no repository on the hub; one is written USER/NAME"),
    ({"to": "peft", "hub_private": "true"}, "hub_private: nothing is uploaded"),
    ({"to": "peft", "trainer.seed": "1"}, "trainer.seed: mlxft export does not use it"),
], ids=str)  # fmt: skip
def test_keys_that_have_no_meaning_are_refused(run, tmp_path, keys, message):
    with pytest.raises(InputError) as error:
        export(f"adapter.init_from={run}/run/adapter", out=tmp_path / "out", **keys)
    assert message in str(error.value)
    assert not list(tmp_path.iterdir())


def test_adapters_that_name_different_bases_need_a_model(run, other, tmp_path):
    second = adapter(other, tmp_path / "second")
    with pytest.raises(InputError, match="model.path: the adapters name different models as their base"):
        export(f"adapter.init_from=[{run}/run/adapter,{second}]", to="peft", out=tmp_path / "p")
