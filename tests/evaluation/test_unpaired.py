"""`mlxft eval` on labelled answers against numpy on the models' own logits, with an adapter and without."""

import json
import math

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_map

from mlxft import cli
from mlxft.config import compose
from mlxft.config.schema import AdapterConfig
from mlxft.errors import GuardStop
from mlxft.evaluation.command import evaluate_config
from mlxft.models.adapters import load_adapter, save_adapter
from mlxft.models.load import load
from tests.evaluation.made import make_adapter
from tests.runs import write_rows
from tests.tiny_models import make_model

ROWS = [
    ([5, 6, 7, 8], [9, 10], True),
    ([20, 21], [22], False),
    ([30] * 9, [31, 32, 33], False),
    ([40, 41, 42], [43, 44], True),
    ([50, 51], [52, 53, 54, 55], True),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("model"), "llama")


def written(path, rows):
    names = ("prompt_ids", "completion_ids", "label")
    return write_rows(path, [dict(zip(names, row, strict=True)) for row in rows])


def answer_logps(model) -> np.ndarray:
    """Returns log p of each row's answer by the model's own forward over the row alone."""
    found = []
    for prompt, answer, _ in ROWS:
        tokens = np.array(prompt + answer)
        logits = np.array(model(mx.array(tokens[None, :-1])), np.float64)[0]
        logps = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        found.append(logps[np.arange(len(prompt) - 1, len(tokens) - 1), answer].sum())
    return np.array(found)


def evaluated(folder, data, *more):
    return evaluate_config(
        compose([f"model.path={folder}", f"data.valid={data}", *more], command="eval").config
    )


def low_rank(folder, where):
    return make_adapter(where, folder)


def whole(folder, where):
    """Every weight a little larger, as adapter.kind=full saves them."""
    model, _ = load(str(folder))
    model.update(tree_map(lambda array: 1.1 * array, model.parameters()))
    save_adapter(where, model, AdapterConfig(kind="full"), str(folder))
    return where


@pytest.mark.parametrize("make", [low_rank, whole])
@pytest.mark.parametrize("batch_size", [1, 3])
def test_ratios_and_shares_are_those_of_the_models_own_logits(make, batch_size, folder, tmp_path):
    adapter, data = make(folder, tmp_path / "adapter"), written(tmp_path / "rows.jsonl", ROWS)
    base, adapted = load(str(folder))[0], load(str(folder))[0]
    load_adapter(adapted, adapter)
    logps = answer_logps(adapted)
    ratios = logps - answer_logps(base)
    good, counts = np.array([label for *_, label in ROWS]), np.array([len(answer) for _, answer, _ in ROWS])
    right = np.where(good, ratios > 0, ratios < 0)
    made = evaluated(folder, data, f"adapter.init_from={adapter}", f"data.batch_size={batch_size}").evaluation
    assert np.abs(ratios).min() > 1e-3
    assert made.log_ratio_desirable == pytest.approx(ratios[good].mean(), rel=1e-3)
    assert made.log_ratio_undesirable == pytest.approx(ratios[~good].mean(), rel=1e-3)
    assert made.margin == pytest.approx(ratios[good].mean() - ratios[~good].mean(), rel=1e-3)
    assert made.desirable_raised == pytest.approx((ratios[good] > 0).mean())
    assert made.undesirable_lowered == pytest.approx((ratios[~good] < 0).mean())
    share = right.mean()
    assert made.accuracy == pytest.approx(share)
    assert made.accuracy_stderr == pytest.approx(math.sqrt(share * (1 - share) / 5))
    assert made.logps_desirable == pytest.approx((logps / counts)[good].mean(), rel=1e-5)
    assert made.logps_undesirable == pytest.approx((logps / counts)[~good].mean(), rel=1e-5)
    assert (made.desirable, made.undesirable, made.tokens) == (3, 2, 12)


def test_without_an_adapter_there_is_nothing_to_compare_with(folder, tmp_path, capsys):
    data = written(tmp_path / "rows.jsonl", ROWS)
    assert cli.main(["eval", f"model.path={folder}", f"data.valid={data}", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    absent = ("accuracy", "accuracy_stderr", "margin", "log_ratio_desirable", "log_ratio_undesirable")
    assert [shown[name] for name in absent] == [None] * 5
    assert shown["logps_desirable"] < 0 and shown["rows"] == 5
    assert cli.main(["eval", f"model.path={folder}", f"data.valid={data}"]) == 0
    assert "accuracy" not in (said := capsys.readouterr().out)
    assert "tokens: 12 in 3 desirable and 2 undesirable answers\n" in said


def test_rows_of_one_kind_have_no_margin(folder, tmp_path):
    data = written(tmp_path / "rows.jsonl", [row for row in ROWS if row[2]])
    made = evaluated(folder, data, f"adapter.init_from={low_rank(folder, tmp_path / 'adapter')}").evaluation
    assert made.accuracy == made.desirable_raised
    assert (made.margin, made.log_ratio_undesirable, made.undesirable_lowered) == (None, None, None)
    assert "undesirable lowered" not in str(made.lines()) and "margin" not in dict(made.lines())


def test_an_adapter_that_changes_nothing_puts_no_row_on_its_side(folder, tmp_path):
    adapter = make_adapter(tmp_path / "adapter", folder, size=0.0)
    data = written(tmp_path / "rows.jsonl", ROWS)
    made = evaluated(folder, data, f"adapter.init_from={adapter}").evaluation
    assert (made.accuracy, made.margin, made.log_ratio_desirable) == (0.0, 0.0, 0.0)


def test_log_probabilities_that_are_not_finite_are_no_result(folder, tmp_path):
    broken = make_model(tmp_path / "model", "llama")
    weights = dict(mx.load(str(broken / "model.safetensors")).items())
    name = "model.embed_tokens.weight"
    weights[name] = weights[name].at[20].add(mx.inf)
    mx.save_safetensors(str(broken / "model.safetensors"), weights, metadata={"format": "mlx"})
    with pytest.raises(GuardStop, match="of 1 of 5 answers are not finite"):
        evaluated(broken, written(tmp_path / "rows.jsonl", ROWS))
