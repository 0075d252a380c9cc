"""Validation while training: what it says of rows with a label, and that training does not notice it."""

import numpy as np
import pytest

from mlxft.config import compose
from mlxft.evaluation.command import evaluate_config
from tests.runs import metrics, train, write_rows

LABELLED = ["trainer=kto", "optimizer.lr=1e-2", "trainer.max_steps=3", "data.batch_size=2", "adapter.rank=4"]


def labelled(path, sizes, seed):
    """Writes rows of random tokens, by turns with the label true and false."""
    random = np.random.default_rng(seed)
    return write_rows(
        path,
        [
            {
                "prompt_ids": random.integers(3, 200, prompt).tolist(),
                "completion_ids": random.integers(3, 200, answer).tolist(),
                "label": number % 2 == 0,
            }
            for number, (prompt, answer) in enumerate(sizes)
        ],
    )


@pytest.fixture
def rows(tmp_path, monkeypatch):
    """Files of labelled answers to train on and to validate with."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))  # of reference log-probabilities
    data = labelled(tmp_path / "rows.jsonl", [(5, 4), (9, 2), (3, 7), (12, 1), (6, 6)], seed=0)
    return data, labelled(tmp_path / "valid.jsonl", [(4, 3), (8, 5), (2, 9), (7, 1), (5, 5)], seed=1)


def test_kto_validates_on_labelled_answers_with_the_figures_of_eval(model, rows, tmp_path):
    data, valid = rows
    result = train(
        model,
        data,
        tmp_path / "run",
        *LABELLED,
        f"data.valid={valid}",
        "trainer.eval_every=1",
        "loss.beta=0.5",
    )
    first, *_, last = metrics(tmp_path / "run", "valid")
    # Before the first step policy and reference are the same: every term is sigmoid(0), no reward has a sign.
    assert (first["step"], first["loss"], first["kl"]) == (0, pytest.approx(0.5), 0.0)
    assert (first["rewards/chosen"], first["rewards/rejected"], first["rewards/accuracies"]) == (0, 0, 0)
    overrides = [f"model.path={model}", f"data.valid={valid}", f"adapter.init_from={result.adapter}"]
    made = evaluate_config(compose(overrides, command="eval").config).evaluation
    assert last["step"] == 3 and last["tokens"] == made.tokens == 23
    assert last["rewards/chosen"] == pytest.approx(0.5 * made.log_ratio_desirable, rel=1e-4)
    assert last["rewards/rejected"] == pytest.approx(0.5 * made.log_ratio_undesirable, rel=1e-4)
    assert last["rewards/margins"] == pytest.approx(0.5 * made.margin, rel=1e-4)
    assert last["rewards/accuracies"] == pytest.approx(made.accuracy)
    assert last["kl"] >= 0 and 0 < last["loss"] < 1


def test_validating_on_labelled_answers_changes_no_step_and_packs_them_too(model, rows, tmp_path):
    data, valid = rows
    validated = [f"data.valid={valid}", "trainer.eval_every=1"]
    train(model, data, tmp_path / "plain", *LABELLED)
    train(model, data, tmp_path / "validated", *LABELLED, *validated)
    train(model, data, tmp_path / "packed", *LABELLED, *validated, "trainer.layout=packed")
    plain, same = (metrics(tmp_path / name, "train") for name in ("plain", "validated"))
    assert plain == same
    padded, packed = (metrics(tmp_path / name, "valid") for name in ("validated", "packed"))
    for one, other in zip(padded, packed, strict=True):
        assert one.pop("kind") == other.pop("kind") == "valid"
        assert one == pytest.approx(other, rel=1e-3, abs=1e-5)


def test_fewer_rows_than_a_batch_are_each_scored_once_and_the_same_every_time(model, data, valid, tmp_path):
    """Three rows, in batches of up to 4, 2 and 1, by a model that does not move."""
    more = [f"data.valid={valid}", "trainer.eval_every=1", "trainer.max_steps=2", "optimizer.lr=1e-30"]
    losses = []
    for size in (4, 2, 1):
        run_dir = tmp_path / str(size)
        train(model, data, run_dir, *more, f"data.batch_size={size}", "adapter.rank=2")
        lines = metrics(run_dir, "valid")
        assert [line["tokens"] for line in lines] == [8 // 2 + 13 // 2 + 5 // 2] * 3
        assert len({line["loss"] for line in lines}) == 1
        losses.append(lines[0]["loss"])
    assert losses[1:] == pytest.approx(losses[:1] * 2, rel=1e-5)
