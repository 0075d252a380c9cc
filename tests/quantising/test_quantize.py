"""`mlxft quantize` writes folders that train, evaluate and load as any model, and says what it did."""

import json

import mlx.core as mx
import numpy as np
import pytest

from mlxft.config import compose
from mlxft.errors import InputError
from mlxft.models.load import load_model
from mlxft.models.trellis.linear import TrellisLinear
from mlxft.quantising import trellis_model
from mlxft.quantising.command import quantise
from mlxft.quantising.inputs import RowsOnTheirWay
from mlxft.training.run import train as run_training
from tests.tiny_models import make_model

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "num_hidden_layers": 2,
}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("model"), "llama", **SIZES)


@pytest.fixture
def rows(tmp_path):
    random = np.random.default_rng(0)
    file = tmp_path / "rows.jsonl"
    ids = random.integers(3, 90, (6, 24)).tolist()
    file.write_text("".join(json.dumps({"input_ids": row}) + "\n" for row in ids))
    return file


def quantised(model, out, *overrides) -> dict:
    composed = compose([f"model.path={model}", f"out={out}", *overrides], command="quantize")
    return quantise(composed.config, composed.own)


def logits(folder, dtype: str = "float32") -> mx.array:
    return load_model(folder, dtype)(mx.arange(3, 40)[None])


def distance(folder, model) -> float:
    apart = logits(folder) - logits(model)
    return (mx.square(apart).mean() / mx.square(logits(model)).mean()).item()


def test_more_bits_are_nearer_to_the_model(model, tmp_path):
    errors, apart = [], []
    for bits in (2, 3, 4):
        figures = quantised(model, tmp_path / f"{bits}", "to=trellis", f"bits={bits}")
        errors.append(figures["relative squared error"])
        apart.append(distance(tmp_path / f"{bits}", model))
    assert errors == pytest.approx([0.075, 0.02, 0.0053], rel=0.15)
    assert apart[0] > apart[1] > apart[2] > 0


def test_layers_of_the_decoder_have_codes_and_the_rest_stays_as_it_was(model, tmp_path):
    quantised(model, tmp_path / "out", "to=trellis", "bits=3")
    section = json.loads((tmp_path / "out" / "config.json").read_text())["trellis"]
    assert section["modules"]["model.layers.1.mlp.down_proj"] == {"bits": 3, "block": 96}
    assert section["modules"]["model.layers.0.self_attn.q_proj"] == {"bits": 3, "block": 64}
    assert len(section["modules"]) == 2 * 7 and section["rotation"] == 0
    weights = {}
    for file in (tmp_path / "out").glob("model*.safetensors"):
        weights |= mx.load(str(file))
    assert weights["model.layers.0.mlp.down_proj.weight"].shape == (64, 96 * 3 // 32)
    assert weights["model.layers.0.mlp.down_proj.scales"].dtype == mx.bfloat16
    (original,) = (mx.load(str(file)) for file in model.glob("*.safetensors"))
    for name in ("model.embed_tokens.weight", "model.norm.weight", "model.layers.1.input_layernorm.weight"):
        assert mx.array_equal(weights[name], original[name])


def test_calibration_brings_what_a_layer_puts_out_nearer(model, rows, tmp_path):
    more = ("to=trellis", "bits=2", "block=32")
    quantised(model, tmp_path / "plain", *more)
    quantised(model, tmp_path / "calibrated", *more, f"data.train={rows}")
    assert distance(tmp_path / "calibrated", model) < distance(tmp_path / "plain", model)


def test_a_stopped_run_goes_on_with_the_layers_that_it_finished(model, rows, tmp_path, monkeypatch):
    chosen = ("to=trellis", "bits=2", f"data.train={rows}")
    quantised(model, tmp_path / "whole", *chosen)
    replace, done = trellis_model._replace, []

    def stopping(made, linear, *others):
        if linear.block == 1 and len(done) < 20:
            raise KeyboardInterrupt
        done.append(linear.path)
        return replace(made, linear, *others)

    monkeypatch.setattr(trellis_model, "_replace", stopping)
    with pytest.raises(KeyboardInterrupt):
        quantised(model, tmp_path / "out", *chosen)
    assert not (tmp_path / "out").exists() and len(done) == 7
    monkeypatch.setattr(trellis_model, "_replace", replace)
    figures = quantised(model, tmp_path / "out", *chosen)
    assert mx.array_equal(logits(tmp_path / "out"), logits(tmp_path / "whole"))
    assert figures["relative squared error"] > 0 and not (tmp_path / ".out.unfinished").exists()


def test_with_rows_to_measure_on_perplexity_is_told_before_and_after(model, rows, tmp_path):
    figures = quantised(model, tmp_path / "out", "to=trellis", "bits=4", f"data.valid={rows}")
    before, after = (float(figures[f"perplexity {when}"].split()[0]) for when in ("before", "after"))
    assert after == pytest.approx(before, rel=0.2) and after != before
    assert figures["perplexity after"] in (tmp_path / "out" / "README.md").read_text()


def test_affine_groups_are_mlx_lms(model, tmp_path):
    figures = quantised(model, tmp_path / "out", "to=affine", "bits=4", "group_size=32")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["quantization"] == {"group_size": 32, "bits": 4, "mode": "affine"}
    assert distance(tmp_path / "out", model) < 0.15 and figures["to"] == "affine"


def test_an_adapter_trains_on_a_trellis_model(model, rows, tmp_path, monkeypatch):
    quantised(model, tmp_path / "out", "to=trellis", "bits=3")
    chosen = [f"model.path={tmp_path / 'out'}", f"data.train={rows}", "trainer.max_steps=8"]
    chosen.append("optimizer.lr=0.02")
    losses = []
    for dense in (True, False):  # a CPU makes layers dense where they fit
        monkeypatch.setattr("mlxft.models.dequantise._SHARE_OF_MEMORY", 0.6 if dense else 0)
        run_training(compose([*chosen, f"run.dir={tmp_path / str(dense)}", "trainer=segmented"]))
        lines = (tmp_path / str(dense) / "metrics.jsonl").read_text().splitlines()
        losses.append([json.loads(line)["loss"] for line in lines])
    assert losses[0][-1] < losses[0][0]
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)


def test_what_is_not_dense_stays_trellis_where_memory_is_short(model, tmp_path, monkeypatch):
    quantised(model, tmp_path / "out", "to=trellis", "bits=3")
    dense = logits(tmp_path / "out")
    monkeypatch.setattr("mlxft.models.dequantise._SHARE_OF_MEMORY", 0)
    kinds = [type(module) for module in load_model(tmp_path / "out").modules()]
    assert kinds.count(TrellisLinear) == 14
    assert mx.allclose(logits(tmp_path / "out"), dense, atol=1e-4)


def test_moments_are_those_of_what_the_layers_are_given(model):
    from mlxft.models.decoder import view

    made = view(load_model(model))
    tokens = [np.arange(3, 20), np.arange(5, 30)]
    given = [made.layers[0].input_layernorm(made.embed(mx.array(row[None]))[0])[0] for row in tokens]
    every = np.concatenate([np.array(each) for each in given]).astype(np.float64)
    found = RowsOnTheirWay(made, tokens).moments(0, ["self_attn.q_proj"], None)["self_attn.q_proj"]
    assert found == pytest.approx(every.T @ every / len(every), abs=1e-6)


@pytest.mark.parametrize(
    "overrides, fault",
    [
        (["to=trellis", "bits=5"], "bits=5: to=trellis has 2, 3, 4"),
        (["to=affine", "bits=7"], "bits=7: to=affine has 2, 3, 4, 5, 6, 8"),
        (["to=trellis", "group_size=32"], "group_size: to=trellis makes no use of it"),
        (["to=affine", "rotate=false"], "rotate: to=affine makes no use of it"),
        (["to=trellis", "calibration_rows=3"], "calibration_rows: there are no rows"),
        (["to=trellis", "block=96"], "can't be cut into trellis blocks of 96"),
        (["to=peft"], "'peft' is not known; there are trellis, affine"),
        ([], "to: it is missing; give a kind"),
    ],
)
def test_what_makes_no_sense_is_refused_and_leaves_nothing(model, tmp_path, overrides, fault):
    with pytest.raises(InputError, match=fault):
        quantised(model, tmp_path / "out", *overrides)
    assert not (tmp_path / "out").exists()


UP = "model.layers.0.mlp.up_proj"


@pytest.mark.parametrize(
    "change, fault",
    [
        ({"modules": {UP: None}}, UP),
        ({"modules": {"model.layers.9.x": {"bits": 3, "block": 64}}}, "layers.9.x, which isn't there"),
        ({"modules": {UP: {"bits": 4, "block": 64}}}, "mlp.up_proj.weight .* instead of"),
        ({"modules": {UP: {"bits": 7, "block": 64}}}, "bits are 2, 3 or 4"),
        ({"modules": {UP: {"bits": 3, "block": 96}}}, "can't be cut"),
        ({"axis": 0}, "axis is 0; this version reads 1 only"),
        ({"interleave": 4}, "interleave, which this version can't read"),
    ],
)
def test_a_configuration_that_the_tensors_do_not_fit_is_refused_with_the_module(
    model, tmp_path, change, fault
):
    quantised(model, tmp_path / "out", "to=trellis", "bits=3")
    file = tmp_path / "out" / "config.json"
    config = json.loads(file.read_text())
    modules = config["trellis"]["modules"] | change.pop("modules", {})
    given = {path: entry for path, entry in modules.items() if entry}
    file.write_text(json.dumps(config | {"trellis": config["trellis"] | change | {"modules": given}}))
    with pytest.raises(InputError, match=fault):
        load_model(tmp_path / "out")


@pytest.mark.parametrize("cut", ["weight", "scales"])
def test_tensors_that_were_cut_short_are_refused_with_the_module(model, tmp_path, cut):
    quantised(model, tmp_path / "out", "to=trellis", "bits=3")
    file = tmp_path / "out" / "model-00001-of-00003.safetensors"
    arrays = dict(mx.load(str(file)))
    arrays[f"{UP}.{cut}"] = arrays[f"{UP}.{cut}"][:-1]
    mx.eval(arrays)
    mx.save_safetensors(str(file), arrays, {"format": "mlx"})
    with pytest.raises(InputError, match=f"{UP}.{cut} .* instead of"):
        load_model(tmp_path / "out")


def test_a_model_that_is_quantised_already_is_refused(model, tmp_path):
    quantised(model, tmp_path / "once", "to=affine")
    with pytest.raises(InputError, match="quantised already"):
        quantised(tmp_path / "once", tmp_path / "twice", "to=affine")


def test_a_folder_with_something_in_it_is_left_alone(model, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("x")
    with pytest.raises(InputError, match="is not empty"):
        quantised(model, tmp_path / "out", "to=trellis")
    assert [file.name for file in (tmp_path / "out").iterdir()] == ["mine"]


def test_affine_groups_that_divide_no_layers_rows_are_refused_and_those_of_some_are_named(tmp_path, caplog):
    model = make_model(tmp_path / "model", "llama", **SIZES | {"hidden_size": 96, "intermediate_size": 128})
    figures = quantised(model, tmp_path / "some", "to=affine", "bits=4", "group_size=64")
    assert "of 16 layers stay as they are, since group_size=64 does not divide their rows: " in caplog.text
    assert figures["bits a weight"] > 16
    narrow = make_model(tmp_path / "narrow", "llama", **SIZES | {"hidden_size": 96, "head_dim": 48})
    with pytest.raises(InputError, match="group_size=128 divides the rows of no layer"):
        quantised(narrow, tmp_path / "none", "to=affine", "bits=4", "group_size=128")
    assert not (tmp_path / "none").exists()


def test_what_is_refused_or_was_killed_leaves_nothing_beside_the_result(model, tmp_path):
    left_over = tmp_path / ".out.99999999"  # of a process that is no more
    left_over.mkdir()
    with pytest.raises(InputError):
        quantised(model, tmp_path / "out", "to=trellis", "bits=3", "block=64")
    quantised(model, tmp_path / "out", "to=affine", "bits=4", "group_size=32")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
