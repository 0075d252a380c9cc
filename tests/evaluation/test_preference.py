"""`mlxft eval` on pairs against numpy on the model's own logits."""

import json
import math

import mlx.core as mx
import numpy as np
import pytest

from mlxft import cli
from mlxft.config import compose
from mlxft.evaluation.command import evaluate_config
from mlxft.models.load import load
from tests.runs import write_rows
from tests.tiny_models import make_model

PAIRS = [([5, 6, 7, 8], [9, 10], [11, 12, 13]), ([20, 21], [22], [23, 24]), ([30] * 9, [31, 32, 33], [34])]


@pytest.fixture
def files(tmp_path):
    names = ("prompt_ids", "chosen_ids", "rejected_ids")
    rows = [dict(zip(names, row, strict=True)) for row in PAIRS]
    return make_model(tmp_path / "model", "llama"), write_rows(tmp_path / "pairs.jsonl", rows)


def answer_logp(model, prompt, answer) -> float:
    tokens = np.array(prompt + answer)
    logits = np.array(model(mx.array(tokens[None, :-1])), np.float64)[0]
    logps = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    return logps[np.arange(len(prompt) - 1, len(tokens) - 1), answer].sum()


def test_accuracy_margin_and_odds_are_those_of_the_models_own_logits(files):
    folder, data = files
    model, _ = load(str(folder))
    sums = np.array([[answer_logp(model, p, c), answer_logp(model, p, r)] for p, c, r in PAIRS])
    means = sums / np.array([[len(c), len(r)] for _, c, r in PAIRS])
    odds = np.log(np.exp(means) / (1 - np.exp(means)))
    found = evaluate_config(compose([f"model.path={folder}", f"data.valid={data}"], command="eval").config)
    made = found.evaluation
    share = (means[:, 0] > means[:, 1]).mean()
    assert made.accuracy == share
    assert made.accuracy_stderr == pytest.approx(math.sqrt(share * (1 - share) / 3))
    assert made.accuracy_of_sums == (sums[:, 0] > sums[:, 1]).mean()
    assert made.margin == pytest.approx((sums[:, 0] - sums[:, 1]).mean(), rel=1e-4)
    assert made.log_odds == pytest.approx((odds[:, 0] - odds[:, 1]).mean(), rel=1e-4)
    assert made.logps_chosen == pytest.approx(means[:, 0].mean(), rel=1e-5)
    assert (made.pairs, made.tokens) == (3, 12)


def test_a_pair_of_one_answer_twice_is_never_right(files):
    """The head takes seven tokens at once: rounding makes either answer of four the likelier."""
    folder, data = files
    random = np.random.default_rng(0)
    answers = [random.integers(3, 200, 4).tolist() for _ in range(80)]
    prompts = [random.integers(3, 200, 5).tolist() for _ in answers]
    names = ("prompt_ids", "chosen_ids", "rejected_ids")
    rows = [dict(zip(names, (p, a, a), strict=True)) for p, a in zip(prompts, answers, strict=True)]
    overrides = [f"model.path={folder}", f"data.valid={write_rows(data, rows)}", "head.kind=chunked"]
    found = evaluate_config(compose([*overrides, "head.chunk=7"], command="eval").config)
    assert (found.evaluation.accuracy, found.evaluation.accuracy_of_sums) == (0.0, 0.0)
    assert found.evaluation.margin == pytest.approx(0.0, abs=1e-3)


def test_the_figures_of_pairs_are_one_json_object(files, capsys):
    folder, data = files
    assert cli.main(["eval", f"model.path={folder}", f"data.valid={data}", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert {"accuracy", "margin", "log_odds", "pairs", "model", "data"} <= shown.keys()
