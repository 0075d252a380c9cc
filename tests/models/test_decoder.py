"""The decoder view: the model's own logits in parts, checked at load, nothing left behind."""

import sys
from itertools import pairwise

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten

from mlxft.errors import InputError
from mlxft.layouts.arrange import LAYOUTS
from mlxft.layouts.cache import TrainingCache
from mlxft.layouts.pieces import Layout, Piece, padded
from mlxft.models.check import check
from mlxft.models.decoder import DecoderView, view
from mlxft.models.families.gemma3 import Gemma3View
from mlxft.models.load import load
from tests.devices import SLACK
from tests.tiny_models import FAMILIES, VOCAB_SIZE, make_model


@pytest.fixture(scope="module", params=FAMILIES)
def model(request, tmp_path_factory):
    return load(str(make_model(tmp_path_factory.mktemp("model"), request.param)), dtype="float32")[0]


def tokens(length, rows=2):
    return mx.random.randint(0, VOCAB_SIZE, (rows, length), key=mx.random.key(length))


def logits_by_parts(made, tokens, layout, cuts=()):
    """Runs the layers in the ranges between `cuts`."""
    edges = [0, *cuts, made.num_layers]
    cache = TrainingCache(layout)
    with made.active():
        state = made.embed(tokens)
        for start, stop in pairwise(edges):
            state = made.run(state, start, stop, cache)
        return made.head({}, made.finish(state))


@pytest.mark.parametrize("length", [5, 20])
@pytest.mark.parametrize("cuts", [(), (1,), (2, 3)])
def test_layers_run_in_any_ranges_give_the_models_own_logits(model, length, cuts):
    """20 positions are more than two of the tiny Gemma's windows of 8."""
    ids = tokens(length)
    own = model(ids)
    difference = (
        mx.abs(logits_by_parts(view(model), ids, padded(length), cuts) - own).max() / mx.abs(own).max()
    )
    assert difference.item() < 1e-5 * SLACK


def test_a_branch_after_a_shared_prompt_equals_its_own_forward(model):
    """Positions restart after the prompt and windows count logical distance, in every family."""
    prompt, chosen, rejected = 11, 4, 6
    ids = tokens(prompt + chosen + rejected, rows=1)
    first = prompt + chosen
    layout = Layout(
        ids.shape[1],
        (
            Piece(0, first, ((0, first),), 0),
            Piece(first, ids.shape[1], ((0, prompt), (first, ids.shape[1])), prompt),
        ),
    )
    shared = logits_by_parts(view(model), ids, layout)
    alone = model(mx.concatenate([ids[:, :prompt], ids[:, first:]], axis=1))[:, prompt:]
    assert mx.abs(shared[:, first:] - alone).max().item() < 1e-5 * SLACK * mx.abs(alone).max().item()


def test_nothing_stays_installed_after_use(model):
    made = view(model)
    attention = model.layers[0].self_attn
    module = sys.modules[type(attention).__module__]
    before = module.scaled_dot_product_attention, attention.rope
    with made.active(), made.active():
        assert module.scaled_dot_product_attention is not before[0]
        assert mx.array_equal(model(tokens(6)), model(tokens(6)))
    assert (module.scaled_dot_product_attention, attention.rope) == before
    with pytest.raises(RuntimeError), made.active():
        raise RuntimeError
    assert (module.scaled_dot_product_attention, attention.rope) == before


def test_the_parameter_tree_is_the_same_while_layouts_are_installed(model):
    names = [name for name, _ in tree_flatten(model.parameters())]
    with view(model).active():
        assert [name for name, _ in tree_flatten(model.parameters())] == names


class _Wrong(DecoderView):
    def finish(self, state):
        return 1.1 * super().finish(state)


def test_a_view_with_other_logits_is_refused_by_name(model):
    with pytest.raises(InputError, match=f"{model.model_type}.*cannot be trained yet.*plainly"):
        check(_Wrong(model))


def test_a_view_that_ignores_a_window_is_refused(tmp_path):
    """Windows are thousands of positions in real models: the check lowers them below its short row."""
    model, _ = load(str(make_model(tmp_path, "gemma3_text", sliding_window=64)), dtype="float32")

    class Forgetful(Gemma3View):
        def windows(self):
            return [None if size is None else 10**6 for size in super().windows()]

    with pytest.raises(InputError, match="cannot be trained yet.*with sliding windows of 4"):
        check(Forgetful(model))


def test_a_view_that_only_layouts_break_is_trained_padded_and_refuses_the_others_by_name(model):
    class MixedUp(type(view(model))):
        """Takes every row for one that starts at position 0 and sees all before it."""

        def run(self, state, start, stop, cache):
            self.require_of(cache)
            return super().run(state, start, stop, TrainingCache(padded(cache.layout.length)))

    made = MixedUp(model)
    check(made)
    assert made.layouts == {"padded"}
    made.require("padded", "checkpoint")
    expected = (
        f"trainer.layout=packed: models of type '{model.model_type}' cannot be trained so: run plainly, "
        "this one's logits differ by .*. Use trainer.layout=padded$"
    )
    packed = Layout(4, (Piece(0, 2, ((0, 2),), 0), Piece(2, 4, ((2, 4),), 0)))
    for refuse in (lambda: made.require("packed"), lambda: logits_by_parts(made, tokens(4), packed)):
        with pytest.raises(InputError, match=expected):
            refuse()


class _OffByOne(DecoderView):
    """Hands on windows one position too long."""

    def windows(self):
        return [None if size is None else size + 1 for size in super().windows()]


def test_a_window_one_position_too_long_is_noticed(tmp_path):
    model, _ = load(str(make_model(tmp_path, "mistral", sliding_window=64)), dtype="float32")
    with pytest.raises(InputError, match="'mistral'.*with sliding windows of 4.*differ"):
        check(_OffByOne(model))


def test_code_that_does_not_run_layer_by_layer_is_refused_with_what_went_wrong(model):
    class Odd(DecoderView):
        def run(self, state, start, stop, cache):
            raise TypeError("layer() takes no cache")

    with pytest.raises(InputError, match=r"not run layer by layer \(TypeError: layer\(\) takes no cache"):
        check(Odd(model))


def test_bfloat16_weights_are_checked_by_what_bfloat16_can_do(tmp_path):
    for dtype in ("bfloat16", "float16"):
        model, _ = load(str(make_model(tmp_path / dtype, "gemma3_text")), dtype=dtype)
        assert view(model).layouts == set(LAYOUTS)
        with pytest.raises(InputError, match="at most [15]e-02 is rounding"):
            check(_Wrong(model))


def test_a_model_of_another_build_is_refused_with_what_it_lacks():
    class Odd(nn.Module):
        model_type = "odd"

    with pytest.raises(InputError, match="'odd' cannot be trained yet.*embed_tokens"):
        DecoderView(Odd())
