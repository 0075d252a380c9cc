"""Tables with rows of their own for new tokens, beside plain layers that have all rows in one array."""

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten

from mlxft.errors import InputError
from mlxft.models.dequantise import dense
from mlxft.models.lora_embedding import LoRAEmbedding
from mlxft.models.lora_linear import adapter_disabled
from mlxft.models.new_rows import EmbeddingWithNewRows, HeadWithNewRows, Start, make_one, mean_rows
from mlxft.models.new_tokens import NewToken, add_new_tokens
from tests.tiny_models import model_config, random_model

WIDTH, SIZE, COUNT = 32, 40, 3
PLACES = {"after the table": 40, "over its end": 39, "at its end": 37, "inside": 20}


def normal(seed, *shape):
    return mx.random.normal(shape, key=mx.random.key(seed))


def with_rows(table, rows, first):
    """The table's array with rows from `first` on."""
    return mx.concatenate([table[:first], rows, table[first + len(rows) :]])


def embedding():
    made = nn.Embedding(SIZE, WIDTH)
    made.weight = normal(1, SIZE, WIDTH)
    return made


def head(bias):
    made = nn.Linear(WIDTH, SIZE, bias=bias)
    made.weight = normal(2, SIZE, WIDTH)
    if bias:
        made.bias = normal(3, SIZE)
    return made


def quantised(layer):
    return layer.to_quantized(group_size=32, bits=4)


@pytest.mark.parametrize("first", PLACES.values(), ids=PLACES)
@pytest.mark.parametrize("packed", [False, True], ids=["dense", "quantised"])
def test_an_embeddings_rows_and_logits_are_those_of_one_array_with_all_rows(first, packed):
    table, rows, x = embedding(), normal(4, COUNT, WIDTH), normal(5, 6, WIDTH)
    table = quantised(table) if packed else table
    plain = nn.Embedding(SIZE, WIDTH)
    plain.weight = with_rows(dense(table, mx.float32).weight if packed else table.weight, rows, first)
    layer = EmbeddingWithNewRows(table, first, Start(rows))
    tokens = mx.arange(layer.size).reshape(-1, 1)
    assert layer.size == max(SIZE, first + COUNT)
    assert mx.array_equal(layer(tokens), plain(tokens))
    assert mx.allclose(layer.as_linear(x), plain.as_linear(x), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("first", PLACES.values(), ids=PLACES)
@pytest.mark.parametrize("packed, bias", [(False, False), (False, True), (True, False)])
def test_a_heads_logits_are_those_of_one_array_with_all_rows(first, packed, bias):
    table, rows, x = head(bias), normal(4, COUNT, WIDTH), normal(5, 6, WIDTH)
    start = Start(rows, normal(6, COUNT) if bias else None)
    table = quantised(table) if packed else table
    weight = with_rows(dense(table, mx.float32).weight if packed else table.weight, rows, first)
    expected = x @ weight.T + (with_rows(table.bias, start.bias, first) if bias else 0)
    assert mx.allclose(HeadWithNewRows(table, first, start)(x), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("first", PLACES.values(), ids=PLACES)
def test_the_gradient_is_that_of_the_same_rows_of_one_array(first):
    """Of a tied embedding, so of both uses."""
    rows, tokens = normal(4, COUNT, WIDTH), mx.array([[1, first, 7, first + 2, first, 36]])
    layer, plain = EmbeddingWithNewRows(embedding(), first, Start(rows)), nn.Embedding(SIZE, WIDTH)
    plain.weight = with_rows(embedding().weight, rows, first)
    layer.freeze()
    layer.unfreeze(recurse=False, keys=["new_rows"])
    loss = lambda made: mx.logsumexp(made.as_linear(mx.tanh(made(tokens))), axis=-1).sum()  # noqa: E731
    found = nn.value_and_grad(layer, loss)(layer)[1]
    expected = nn.value_and_grad(plain, loss)(plain)[1]["weight"][first : first + COUNT]
    assert [name for name, _ in tree_flatten(found)] == ["new_rows"]
    assert mx.allclose(found["new_rows"], expected, rtol=1e-4, atol=1e-5)


def test_rows_are_float32_and_what_comes_out_has_the_tables_type():
    table = embedding()
    table.weight = table.weight.astype(mx.bfloat16)
    layer = EmbeddingWithNewRows(table, SIZE, mean_rows(table, [(1, 2)]))
    assert layer.new_rows.dtype == mx.float32
    assert layer(mx.array([3, SIZE])).dtype == layer.as_linear(layer(mx.array([3]))).dtype == mx.bfloat16


@pytest.mark.parametrize("packed", [False, True], ids=["dense", "quantised"])
def test_new_rows_begin_as_the_mean_of_their_pieces(packed):
    tables = [embedding(), head(bias=False)]
    for table in map(quantised, tables) if packed else tables:
        weight = dense(table, mx.float32).weight if packed else table.weight
        start = mean_rows(table, [(3,), (1, 2, 2)])
        assert start.bias is None
        assert mx.allclose(start.rows[0], weight[3], rtol=1e-6)
        assert mx.allclose(start.rows[1], (weight[1] + 2 * weight[2]) / 3, rtol=1e-5, atol=1e-6)
    biased = head(bias=True)
    assert mx.allclose(mean_rows(biased, [(1, 2)]).bias[0], (biased.bias[1] + biased.bias[2]) / 2, rtol=1e-6)


def test_a_new_token_begins_no_likelier_than_its_pieces_are_on_average():
    table, pieces, x = head(bias=True), [(3, 9), (1, 2, 5, 7)], normal(5, 200, WIDTH)
    layer = HeadWithNewRows(table, SIZE, mean_rows(table, pieces))
    probability = mx.softmax(layer(x), axis=-1)
    for place, made_of in enumerate(pieces):
        assert (probability[:, SIZE + place] <= probability[:, mx.array(made_of)].mean(axis=1) * 1.0001).all()


def test_with_the_adapter_off_new_rows_are_what_they_began_as():
    layer = EmbeddingWithNewRows(embedding(), SIZE, Start(normal(4, COUNT, WIDTH)))
    before, moved = layer(mx.array([SIZE])), normal(7, COUNT, WIDTH)
    layer.new_rows = moved
    with adapter_disabled(layer):
        assert mx.array_equal(layer(mx.array([SIZE])), before)
    assert mx.array_equal(layer(mx.array([SIZE])), moved[:1])


def test_a_table_with_a_low_rank_update_of_its_own_keeps_both():
    adapted = LoRAEmbedding(embedding(), normal(8, SIZE, 2), normal(9, 2, WIDTH), 0.5)
    layer = EmbeddingWithNewRows(adapted, SIZE, Start(normal(4, COUNT, WIDTH)))
    x = normal(5, 6, WIDTH)
    assert mx.array_equal(layer(mx.array([3, SIZE + 1])), mx.stack([adapted(mx.array(3)), layer.new_rows[1]]))
    assert mx.array_equal(layer.as_linear(x)[:, :SIZE], adapted.as_linear(x))
    assert (layer.table_size, layer.size) == (SIZE, SIZE + COUNT)


@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt2"])
def test_a_model_made_plain_again_gives_the_same(family):
    model = random_model(model_config(family))
    number = model_config(family)["vocab_size"]
    add_new_tokens(model, [NewToken(number, "a", False, (5, 6)), NewToken(number + 1, "b", True, (7,))])
    tokens = mx.array([[5, number, 80, number + 1, 7]])
    expected = model(tokens)
    assert expected.shape[-1] == number + 2
    make_one(model)
    assert not [path for path, _ in tree_flatten(model.parameters()) if "new_rows" in path]
    assert mx.allclose(model(tokens), expected, rtol=1e-5, atol=1e-5)


def test_quantised_tables_are_not_made_plain():
    model = random_model(model_config("qwen3"))
    nn.quantize(model, group_size=32, bits=4)
    add_new_tokens(model, [NewToken(259, "a", False, (5, 6))])
    with pytest.raises(InputError, match="model.embed_tokens is quantised"):
        make_one(model)


def test_a_family_that_looks_tokens_up_in_a_second_table_is_refused():
    model = random_model(model_config("gemma4_text"))
    with pytest.raises(InputError, match="'gemma4_text' look each token up in a second table"):
        add_new_tokens(model, [NewToken(259, "a", False, (5, 6))])
