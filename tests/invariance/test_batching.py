"""What must not change loss or gradients, beside what test_combinations compares: padding, compiling."""

from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten, tree_map

from mlxft.data.example import Example
from mlxft.layouts.arrange import Arranger, Group
from mlxft.segmented.gradients import Gradient
from mlxft.training.objectives.common import HeadPlan
from mlxft.training.objectives.sft import Sft
from tests.devices import CLOSE, SLACK
from tests.gradients import added_up, difference, fill_adapters, rows


def window(made, batches, kind="whole", compiled=False, key=None, arranger=None):
    """Loss and gradients of one window."""
    objective = Sft(HeadPlan("full"), arranger or Arranger())
    gradient = Gradient(made, objective, kind, compiled)
    counts = {"tokens": sum(objective.counts(batch)["tokens"] for batch in batches)}
    drawn = {} if key is None else {"dropout_key": mx.random.key(key)}
    prepared = [objective.prepare(batch, counts) for batch in batches]
    params = made.model.trainable_parameters()
    return added_up(gradient(params, each.inputs | drawn, each.layout) for each in prepared)


@pytest.mark.parametrize("pad_id", [0, 7])
def test_neither_the_padding_token_nor_its_width_matters(made, pad_id, monkeypatch):
    monkeypatch.setattr("mlxft.layouts.arrange._PAD_ID", pad_id)
    wide = Arranger("padded", 32)
    assert wide([Group(np.zeros(0, np.int32), (rows()[0].tokens,))]).tokens[0, -1] == pad_id
    alone = window(made, [[row] for row in rows()])
    assert difference(alone, window(made, [rows()], arranger=wide)) < CLOSE * SLACK


@pytest.mark.parametrize("kind", ["whole", "checkpoint"])
def test_compiling_changes_nothing(made, kind):
    batches = [rows()]
    plain = window(made, batches, kind=kind, key=4)
    assert difference(plain, window(made, batches, kind=kind, key=4, compiled=True)) < CLOSE * SLACK


def test_a_compiled_step_sees_new_weights_keys_and_rows(made):
    """Whatever changes between steps must be an input of the program, not baked into it."""
    objective = Sft(HeadPlan("full"), Arranger("padded", 32))
    compiled, plain = (Gradient(made, objective, "whole", compiled=c) for c in (True, False))
    params = made.model.trainable_parameters()
    for step in range(3):
        batch = [rows((9, 12))[0], rows((11 - step, 9))[1]]
        prepared = objective.prepare(batch, {"tokens": objective.counts(batch)["tokens"] + step})
        inputs, layout = dict(prepared.inputs), prepared.layout
        inputs["dropout_key"] = mx.random.key(step)
        loss, _, gradients = compiled(params, inputs, layout)
        expected, _, expected_gradients = plain(params, inputs, layout)
        assert loss.item() == pytest.approx(expected.item(), rel=CLOSE * SLACK)
        flat, expected_flat = dict(tree_flatten(gradients)), dict(tree_flatten(expected_gradients))
        for name in flat:
            assert np.allclose(np.array(flat[name]), np.array(expected_flat[name]), atol=1e-5 * SLACK)
        params = tree_map(lambda p, g: p - 0.1 * g, made.model.trainable_parameters(), gradients)
        made.model.update(params)
    fill_adapters(made.model)


def test_a_window_of_masked_rows_has_no_loss_and_no_gradient(made):
    masked = [[Example(row.tokens, np.zeros_like(row.mask), row.where) for row in rows()]]
    loss, gradients = window(made, masked)
    assert loss == 0.0
    assert all(np.abs(array).max() == 0.0 for array in gradients.values())


def whole_rows(*lengths) -> list[Example]:
    """Rows every token of which is trained on but the first, which nothing predicts."""
    return [replace(row, mask=np.ones_like(row.mask)) for row in rows(lengths)]


def test_rows_of_4_and_10_tokens_have_3_and_9_targets_side_by_side(made):
    four, ten = whole_rows(4, 10)
    objective = Sft(HeadPlan("full"), Arranger())
    assert objective.counts([four, ten])["tokens"] == 3 + 9
    assert difference(window(made, [[four], [ten]]), window(made, [[four, ten]])) < CLOSE * SLACK


@pytest.mark.parametrize("lengths", [(3, 30), (3, 30, 5, 12)], ids=["two rows", "four rows"])
def test_a_row_counts_by_its_tokens_however_many_micro_batches_there_are(made, lengths):
    """One batch, and as many micro-batches as rows: the sum is divided once, by all targets together."""
    given = whole_rows(*lengths)
    together, apart = window(made, [given]), window(made, [[row] for row in given])
    assert difference(together, apart) < CLOSE * SLACK
    sums = sum(window(made, [[row]])[0] * (row.num_tokens - 1) for row in given)
    assert apart[0] == pytest.approx(sums / (sum(lengths) - len(lengths)), rel=CLOSE * SLACK)


def test_packed_rows_do_not_see_each_other(made):
    """Rows of 3 and 5 tokens: behind one another in one forward they cost what each costs alone."""
    three, five = whole_rows(3, 5)
    packed = window(made, [[three, five]], arranger=Arranger("packed"))
    assert difference(window(made, [[three], [five]]), packed) < CLOSE * SLACK
