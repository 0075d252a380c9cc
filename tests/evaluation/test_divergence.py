"""A model against a reference, worked out in numpy from both models' own logits."""

import math

import mlx.core as mx
import numpy as np
import pytest

from mlxft.config import compose
from mlxft.errors import InputError
from mlxft.evaluation.command import evaluate_config
from mlxft.models import load
from mlxft.models.adapters import load_adapter
from mlxft.models.lora_linear import adapter_disabled
from tests.evaluation.made import examples, make_adapter
from tests.runs import write_rows, write_token_rows
from tests.tiny_models import make_model

EXACT = 1e-4  # float32 against float64, differences of like numbers


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("model"), "llama")


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    return write_token_rows(tmp_path_factory.mktemp("data") / "rows.jsonl", (12, 3, 30, 7, 19))


def configured(folder, data, *overrides):
    composed = compose([f"model.path={folder}", f"data.valid={data}", *overrides], command="eval")
    return evaluate_config(composed.config, composed.own.eval)


def supervised_logps(model, rows):
    """Returns the log-probabilities (M, V) float64 of the predictions of every supervised token."""
    made = []
    for row in examples(rows):
        logits = np.array(model(mx.array(row.tokens)[None])[0, :-1].astype(mx.float32), np.float64)
        logits = logits[row.mask[1:]]
        made.append(logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True)))
    return np.concatenate(made)


def expected(own, reference, targets):
    """Returns (M,) each: KL(reference || own), the change of the loss, whether both have one likeliest."""
    kl = (np.exp(reference) * (reference - own)).sum(axis=-1)
    change = (reference - own)[np.arange(len(own)), targets]
    return kl, change, own.argmax(axis=-1) == reference.argmax(axis=-1)


def check(found, kl, change, same):
    made, number = found.as_dict(), len(kl)
    assert made["kl"] == pytest.approx(kl.mean(), rel=EXACT)
    assert made["kl_stderr"] == pytest.approx(kl.std(ddof=1) / math.sqrt(number), rel=EXACT)
    assert made["kl_median"] == pytest.approx(np.median(kl), rel=EXACT)
    assert made["kl_p95"] == pytest.approx(np.quantile(kl, 0.95), rel=EXACT)
    assert made["agreement"] == pytest.approx(same.mean())
    assert made["loss_change"] == pytest.approx(change.mean(), rel=EXACT)
    assert made["loss_change_stderr"] == pytest.approx(change.std(ddof=1) / math.sqrt(number), rel=EXACT)
    assert made["loss"] - made["reference"]["loss"] == pytest.approx(made["loss_change"], rel=EXACT)


def targets_of(rows):
    return np.concatenate([row.tokens[1:][row.mask[1:]] for row in examples(rows)])


@pytest.mark.parametrize("head", ["head.kind=full", "head.chunk=5"])
@pytest.mark.parametrize("batch_size", [1, 5])
def test_an_adapter_against_its_base_is_as_of_both_models_own_logits(
    head, batch_size, folder, rows, tmp_path
):
    adapter = make_adapter(tmp_path, folder)
    model, _ = load(str(folder))
    load_adapter(model, adapter)
    own = supervised_logps(model, rows)
    with adapter_disabled(model):
        base = supervised_logps(model, rows)
    overrides = [f"adapter.init_from={adapter}", "eval.reference=base", head, f"data.batch_size={batch_size}"]
    check(configured(folder, rows, *overrides), *expected(own, base, targets_of(rows)))


@pytest.mark.parametrize("family", ["llama", "qwen3_5"])
def test_another_model_as_the_reference_is_as_of_its_own_logits(family, rows, tmp_path):
    folders = [make_model(tmp_path / str(seed), family, seed=seed) for seed in (0, 1)]
    own, other = (supervised_logps(load(str(each))[0], rows) for each in folders)
    found = configured(folders[0], rows, f"eval.reference={folders[1]}")
    check(found, *expected(own, other, targets_of(rows)))
    assert found.as_dict()["reference"]["model"] == str(folders[1])


def test_a_model_is_at_no_distance_from_itself(folder, rows):
    made = configured(folder, rows, f"eval.reference={folder}").as_dict()
    assert abs(made["kl"]) < 1e-6
    assert (made["agreement"], made["loss_change"]) == (1.0, 0.0)


def test_a_reference_with_other_tokens_is_refused(folder, rows, tmp_path):
    other = make_model(tmp_path, "llama", vocab_size=300)
    with pytest.raises(InputError, match="eval.reference=.*: its tokens are not those of"):
        configured(folder, rows, f"eval.reference={other}")


def test_labelled_answers_are_compared_with_the_reference_that_is_named(folder, tmp_path):
    rows = [{"prompt_ids": [5, 6, 7], "completion_ids": [8, 9], "label": bool(n % 2)} for n in range(4)]
    data = write_rows(tmp_path / "rows.jsonl", rows)
    other = make_model(tmp_path / "other", "llama", seed=1)
    made = configured(folder, data, f"eval.reference={other}").as_dict()
    ratio = sum_of_logps(load(str(folder))[0]) - sum_of_logps(load(str(other))[0])
    assert made["log_ratio_desirable"] == pytest.approx(ratio, abs=1e-5)  # of float32 sums near 11
    assert made["reference"] == {"model": str(other)}


def sum_of_logps(model):
    logits = np.array(model(mx.array([[5, 6, 7, 8]]))[0, 2:].astype(mx.float32), np.float64)
    logps = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
    return logps[0, 8] + logps[1, 9]


@pytest.mark.parametrize("key", ["stride=8", "chat=true", "max_tokens=9", "extract=x", "batch_tokens=9"])
def test_a_key_that_rows_make_no_use_of_is_refused(key, folder, rows):
    with pytest.raises(InputError, match=f"eval.{key.partition('=')[0]}: it is for rows of the format"):
        configured(folder, rows, f"eval.{key}")


def test_the_first_rows_can_be_evaluated_alone(folder, rows, tmp_path):
    first = tmp_path / "first.jsonl"
    first.write_text("".join(rows.read_text().splitlines(keepends=True)[:2]))
    assert configured(folder, rows, "eval.limit=2").as_dict()["loss"] == pytest.approx(
        configured(folder, first).as_dict()["loss"]
    )


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (["eval.reference=base"], "eval.reference: there is no adapter to compare with its base"),
        (["eval.stride=4096"], "eval.stride: windows have data.max_length=2048 tokens; give fewer"),
        (["eval.timeout=3"], "eval.timeout: it is of programs, and none is run"),
        (["eval.num_fewshot=3"], "eval.num_fewshot: it is of lm-eval's tasks"),
        (["eval.tasks=arc_easy"], "data.valid: lm-eval's tasks bring their own"),
        (["eval.extract='('"], "eval.extract: .* is no pattern"),
        (["eval.refrence=base"], "did you mean eval.reference"),
    ],
)
def test_what_makes_no_sense_is_told_before_anything_is_loaded(overrides, told, rows):
    with pytest.raises(InputError, match=told):
        compose(["model.path=owner/name", f"data.valid={rows}", *overrides], command="eval")
