"""Continuations against the model's own forward over each of them alone."""

import mlx.core as mx
import numpy as np
import pytest

from mlxft.errors import GuardStop
from mlxft.evaluation.continuations import Continuation, Scorer
from mlxft.layouts.arrange import tree
from mlxft.layouts.pieces import Piece
from mlxft.models import load
from mlxft.models.decoder import view
from mlxft.training.objectives.common import HeadPlan
from tests.devices import ON_CPU
from tests.evaluation.made import alone
from tests.tiny_models import make_model

EXACT = 1e-4  # float32 against float64, sums of up to five tokens, other shapes than alone
# Plain, with windows, with states, with shared keys; the last can only be padded.
FAMILIES = ["llama", "gemma3_text", "qwen3_5", "gemma4_text", "gpt2"]


def drawn(random, length):
    return random.integers(3, 250, length).astype(np.int32)


@pytest.fixture(scope="module")
def continuations():
    """Three questions after the same examples and one alone, four choices each, of one token or more."""
    random = np.random.default_rng(0)
    examples = drawn(random, 20)
    contexts = [np.concatenate([examples, drawn(random, 7 + number)]) for number in range(3)]
    contexts.append(drawn(random, 5))
    return [Continuation(context, drawn(random, number)) for context in contexts for number in (1, 1, 3, 5)]


@pytest.mark.parametrize("family", FAMILIES)
def test_scores_are_those_of_each_continuation_alone(family, continuations, tmp_path):
    model, _ = load(str(make_model(tmp_path, family)))
    for batch_tokens in (1, 60, 4096):
        scorer = Scorer(view(model), HeadPlan("chunked", 3), batch_tokens)
        for each, score in zip(continuations, scorer(continuations), strict=True):
            logp, greedy = alone(model, each)
            assert score.logp == pytest.approx(logp, abs=EXACT)
            assert score.is_greedy == greedy


def test_the_likeliest_continuation_is_told(tmp_path):
    model, _ = load(str(make_model(tmp_path, "llama")))
    context = np.arange(5, 12, dtype=np.int32)
    likeliest = int(model(mx.array(context)[None])[0, -1].argmax())
    found = Scorer(view(model))([Continuation(context, np.array([token])) for token in (likeliest, 3)])
    assert [score.is_greedy for score in found] == [True, likeliest == 3]


@pytest.mark.skipif(not ON_CPU, reason="a GPU's lengths are rounded up")
def test_what_continuations_begin_with_is_forwarded_once(continuations, tmp_path):
    scorer = Scorer(view(load(str(make_model(tmp_path, "llama")))[0]))
    scorer(continuations)
    # The examples, the questions of 7, 8, 9 and 5 tokens, and of the choices of 3 and 5 all but the last.
    assert scorer.forwarded == 20 + 7 + 8 + 9 + 5 + 4 * (2 + 4)
    assert scorer.alone == sum(4 * length + 2 + 4 for length in (27, 28, 29, 5))


def test_a_forward_has_no_more_tokens_than_it_may(continuations, tmp_path):
    scorer = Scorer(view(load(str(make_model(tmp_path, "llama")))[0]), batch_tokens=60)
    batches = list(scorer.batches(continuations))
    assert sorted(number for batch in batches for number in batch) == list(range(16))
    for batch in batches:
        assert tree([continuations[number].row for number in batch]).num_positions <= 60


def test_scores_that_are_not_finite_stop_it(continuations, tmp_path):
    model, _ = load(str(make_model(tmp_path, "llama")))
    model.model.embed_tokens.weight[int(continuations[0].context[0])] = float("nan")
    with pytest.raises(GuardStop, match="log-probabilities of 12 of 16 continuations are not finite"):
        Scorer(view(model))(continuations)


def test_a_tree_sees_what_its_row_begins_with_to_any_depth():
    rows = [[1, 2, 3, 4, 9], [1, 2, 3, 4, 5, 6, 9], [1, 2, 3, 7, 9], [1, 2, 3, 7, 8], [2, 3, 9]]
    made = tree([np.array(row, np.int32) for row in rows])
    assert made.tokens.tolist() == [[1, 2, 3, 4, 5, 6, 7, 2, 3]]
    assert made.layout.pieces == (
        Piece(0, 4, ((0, 4),), 0),
        Piece(4, 6, ((0, 4), (4, 6)), 4),
        Piece(6, 7, ((0, 3), (6, 7)), 3),
        Piece(7, 9, ((7, 9),), 0),
    )
    flat = made.tokens.reshape(-1)
    assert [flat[places].tolist() for places in made.places] == [row[:-1] for row in rows]


def test_a_tree_shares_whole_blocks():
    rows = [np.array(row, np.int32) for row in ([1, 2, 3, 4, 5, 6, 9], [1, 2, 3, 4, 5, 7, 9])]
    made = tree(rows, 4)
    assert [piece.start % 4 for piece in made.layout.pieces] == [0, 0]
    assert made.layout.pieces[1].keys == ((0, 4), (8, 12))
    flat = made.tokens.reshape(-1)
    assert [flat[places].tolist() for places in made.places] == [row[:-1].tolist() for row in rows]
