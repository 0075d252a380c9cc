"""New tokens in the tokenizer, on the model and in an adapter's folder."""

import json
import shutil

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten

from mlxft.config import from_dict
from mlxft.config.schema import AdapterConfig
from mlxft.errors import InputError
from mlxft.models.adapters import load_adapter, save_adapter, save_peft_adapter
from mlxft.models.decoder import view
from mlxft.models.load import load_model, load_tokenizer
from mlxft.models.lora import apply_adapter
from mlxft.models.lora_linear import adapter_disabled
from mlxft.models.new_rows import NewRows
from mlxft.models.new_tokens import load_vocabulary
from tests.tiny_models import VOCAB_SIZE, make_model

CALL, RESULT = "<|call|>", "<|result|>"
TOKENS = mx.array([[5, VOCAB_SIZE, 80, VOCAB_SIZE + 1, 7]])


def vocabulary_of(folder, adapters=(), **model):
    config = {"model.path": str(folder), "data.train": __file__} | {f"model.{k}": v for k, v in model.items()}
    if adapters:
        config["adapter.init_from"] = [str(adapter) for adapter in adapters]
    return load_vocabulary(from_dict(config), folder)


def moved(model):
    """All that is trained, off its start."""
    for number, (name, array) in enumerate(tree_flatten(model.trainable_parameters())):
        off = array + 0.05 * mx.random.normal(array.shape, key=mx.random.key(number))
        model.load_weights([(name, off)], strict=False)
    return model


def trained(folder, texts=(CALL, RESULT), adapter=None, **settings):
    """A model with two new tokens and an adapter, off their start; and its vocabulary."""
    vocabulary = vocabulary_of(folder, new_tokens=list(texts))
    model = load_model(folder, new=vocabulary.new)
    cfg = AdapterConfig(**({"rank": 2, "targets": ["q_proj"]} | settings))
    apply_adapter(model, cfg)
    moved(model)
    if adapter is not None:
        save_adapter(adapter, model, cfg, str(folder), vocabulary.tokenizer)
    return model, vocabulary


@pytest.fixture
def folder(tmp_path):
    return make_model(tmp_path / "base", "qwen3")


def test_new_tokens_are_one_token_wherever_they_stand_and_get_the_next_numbers(folder, caplog):
    caplog.set_level("INFO", "mlxft")
    vocabulary = vocabulary_of(folder, new_tokens=[CALL, "ab c"], new_special_tokens=[RESULT])
    assert [(each.number, each.text, each.special) for each in vocabulary.new] == [
        (259, CALL, False),
        (260, "ab c", False),
        (261, RESULT, True),
    ]
    assert vocabulary.new[1].pieces == tuple(byte + 3 for byte in b"ab c")
    assert vocabulary.size == view(load_model(folder, new=vocabulary.new)).vocabulary == 262
    tokens = vocabulary.tokenizer.encode(f"x{CALL}ab cd{RESULT}", add_special_tokens=False)
    assert tokens == [ord("x") + 3, 259, 260, ord("d") + 3, 261]
    assert vocabulary.tokenizer.decode(tokens) == f"x{CALL}ab cd{RESULT}"
    assert vocabulary.tokenizer.decode(tokens, skip_special_tokens=True) == f"x{CALL}ab cd"
    assert "ids 259 to 261, and the embedding grows" in caplog.text


def test_the_tokenizer_is_what_it_was_otherwise(folder):
    before, after = load_tokenizer(folder), vocabulary_of(folder, new_tokens=[CALL]).tokenizer
    turns = [{"role": "user", "content": "Hi, <|im_end|>"}]
    assert after.apply_chat_template(turns) == before.apply_chat_template(turns)
    assert after.eos_token_ids == before.eos_token_ids and after.pad_token_id == before.pad_token_id
    detokenizer = after.detokenizer
    for token in after.encode(f"a {CALL} b", add_special_tokens=False):
        detokenizer.add_token(token)
    detokenizer.finalize()
    assert detokenizer.text == f"a {CALL} b"


def test_rows_to_spare_are_used_before_the_embedding_grows(tmp_path, caplog):
    caplog.set_level("INFO", "mlxft")
    folder = make_model(tmp_path / "padded", "llama", vocab_size=300)
    vocabulary = vocabulary_of(folder, new_tokens=[CALL])
    assert (vocabulary.new[0].number, vocabulary.size) == (259, 300)
    assert "id 259, in rows that the vocabulary has to spare" in caplog.text
    model = load_model(folder, new=vocabulary.new)
    assert model(TOKENS).shape[-1] == view(model).vocabulary == 300


def test_a_token_of_the_vocabulary_is_used_as_it_is_and_that_is_said(folder, caplog):
    caplog.set_level("INFO", "mlxft")
    vocabulary = vocabulary_of(folder, new_special_tokens=["<|im_end|>"])
    assert (vocabulary.new, vocabulary.size) == ((), VOCAB_SIZE)
    assert "'<|im_end|>' is in the vocabulary already, as token 2, and is used as it is" in caplog.text


def test_a_token_that_would_not_be_written_as_it_is_read_is_refused(folder):
    with pytest.raises(InputError, match="model.new_tokens: .* would write the token 'größe' as"):
        vocabulary_of(folder, new_tokens=["größe"])


def test_a_tokenizer_with_more_tokens_than_the_model_is_refused(tmp_path):
    folder = make_model(tmp_path / "small", "llama", vocab_size=250)
    with pytest.raises(InputError, match="has 259 tokens and the model an embedding of 250"):
        vocabulary_of(folder, new_tokens=[CALL])


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("quantise", [None, 4])
@pytest.mark.parametrize("settings", [
    {},
    {"kind": "dora"},
    {"modules_to_save": ["embed_tokens"]},
    {"targets": ["embed_tokens", "q_proj"]},
], ids=["lora", "dora", "whole embedding", "lora on the embedding"])  # fmt: skip
def test_an_adapter_brings_its_tokens_along(tmp_path, family, quantise, settings, monkeypatch):
    monkeypatch.setattr("mlxft.models.dequantise._SHARE_OF_MEMORY", 0)  # quantised stays so
    folder, adapter = make_model(tmp_path / "base", family, quantize=quantise), tmp_path / "adapter"
    model, vocabulary = trained(folder, adapter=adapter, **settings)
    saved = mx.load(str(adapter / "adapters.safetensors"))
    assert saved.keys() == dict(tree_flatten(model.trainable_parameters())).keys()
    again = vocabulary_of(folder, [adapter])
    assert again.new == vocabulary.new
    loaded, continued = (load_model(folder, new=again.new) for _ in range(2))
    load_adapter(loaded, adapter)
    apply_adapter(continued, AdapterConfig(kind=settings.get("kind", "lora"), init_from=str(adapter)))
    for other in (loaded, continued):
        assert mx.allclose(other(TOKENS), model(TOKENS), rtol=1e-5, atol=1e-5)
    base = load_model(folder, new=again.new)
    with adapter_disabled(loaded):
        assert mx.allclose(loaded(TOKENS), base(TOKENS), rtol=1e-4, atol=1e-4)
    assert not mx.allclose(model(TOKENS), base(TOKENS), rtol=1e-2, atol=1e-2)


def test_whole_weights_have_the_rows_in_their_tables(tmp_path):
    folder, adapter = make_model(tmp_path / "base", "llama"), tmp_path / "adapter"
    model, vocabulary = trained(folder, adapter=adapter, kind="full", rank=None, targets=None)
    saved = mx.load(str(adapter / "adapters.safetensors"))
    assert saved["lm_head.weight"].shape == saved["model.embed_tokens.weight"].shape == (261, 64)
    loaded = load_model(folder, new=vocabulary_of(folder, [adapter]).new)
    load_adapter(loaded, adapter)
    assert mx.array_equal(loaded(TOKENS), model(TOKENS))


def test_the_adapters_folder_has_the_tokenizer(folder, tmp_path):
    trained(folder, adapter=tmp_path / "adapter")
    said = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert said["new_tokens"][1] == {"id": 260, "text": RESULT, "special": False}
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "adapter")
    assert tokenizer.encode(CALL) == [259] and tokenizer.chat_template


def test_without_new_tokens_no_tokenizer_is_written(folder, tmp_path):
    model, cfg = load_model(folder), AdapterConfig(rank=2)
    apply_adapter(model, cfg)
    save_adapter(tmp_path / "adapter", model, cfg, str(folder), load_tokenizer(folder))
    names = {path.name for path in (tmp_path / "adapter").iterdir()}
    assert names == {"adapters.safetensors", "adapter_config.json"}
    assert "new_tokens" not in json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())


def test_more_tokens_come_after_those_of_the_adapter_and_begin_as_their_pieces(folder, tmp_path):
    model, _ = trained(folder, adapter=tmp_path / "adapter")
    vocabulary = vocabulary_of(folder, [tmp_path / "adapter"], new_tokens=["more", CALL])
    assert [each.text for each in vocabulary.new] == [CALL, RESULT, "more"]
    longer = load_model(folder, new=vocabulary.new)
    load_adapter(longer, tmp_path / "adapter")
    rows, table = longer.model.embed_tokens.new_rows, longer.model.embed_tokens.table.weight
    assert mx.array_equal(rows[:2], model.model.embed_tokens.new_rows)
    assert mx.allclose(rows[2], table[mx.array([byte + 3 for byte in b"more"])].mean(axis=0), rtol=1e-5)


def test_tokens_can_be_added_to_an_adapter_of_the_embedding_that_had_none(folder, tmp_path):
    cfg = AdapterConfig(rank=2, targets=["embed_tokens", "q_proj"])
    model = load_model(folder)
    apply_adapter(model, cfg)
    save_adapter(tmp_path / "adapter", moved(model), cfg, str(folder))
    longer = load_model(folder, new=vocabulary_of(folder, [tmp_path / "adapter"], new_tokens=[CALL]).new)
    load_adapter(longer, tmp_path / "adapter")
    tokens = mx.array([[5, 80, 7]])
    assert mx.allclose(longer(tokens)[..., :VOCAB_SIZE], model(tokens), rtol=1e-5, atol=1e-5)


def test_adapters_with_the_same_new_tokens_are_added_up_and_with_others_are_not(folder, tmp_path):
    (one, vocabulary), (two, _) = (trained(folder, adapter=tmp_path / name) for name in "ab")
    adapters = [tmp_path / "a", tmp_path / "b"]
    both = load_model(folder, new=vocabulary_of(folder, adapters).new)
    start = both.model.embed_tokens.new_rows
    load_adapter(both, adapters, weights=[1.0, 0.5])
    expected = start + sum(
        weight * (model.model.embed_tokens.new_rows - start) for weight, model in ((1.0, one), (0.5, two))
    )
    assert mx.allclose(both.model.embed_tokens.new_rows, expected, rtol=1e-5, atol=1e-6)
    trained(folder, texts=["other"], adapter=tmp_path / "c")
    with pytest.raises(InputError, match="the new token 'other' as 259, and with the tokenizer in .* be 260"):
        vocabulary_of(folder, [tmp_path / "a", tmp_path / "c"])


@pytest.mark.parametrize(
    "family, size, message",
    [
        ("llama", VOCAB_SIZE, "no rows of its new tokens for lm_head. It was trained on another model"),
        ("qwen3", 512, None),  # padded: the tokenizer is the same, and so are the numbers
    ],
)
def test_a_model_with_other_tables_than_the_adapters_is_refused(folder, tmp_path, family, size, message):
    trained(folder, adapter=tmp_path / "adapter")
    other = make_model(tmp_path / "other", family, vocab_size=size)
    model = load_model(other, new=vocabulary_of(other, [tmp_path / "adapter"]).new)
    if message is None:
        load_adapter(model, tmp_path / "adapter")
        return
    with pytest.raises(InputError, match=message):
        load_adapter(model, tmp_path / "adapter")


def test_a_tokenizer_that_numbers_the_tokens_otherwise_or_has_them_is_refused(folder, tmp_path):
    _, vocabulary = trained(folder, adapter=tmp_path / "adapter")
    longer = make_model(tmp_path / "longer", "qwen3")
    vocabulary_of(folder, new_tokens=["first"]).tokenizer.save_pretrained(longer)
    with pytest.raises(InputError, match="'<.call.>' as 259, and with the tokenizer in .*longer.* be 260"):
        vocabulary_of(longer, [tmp_path / "adapter"])
    merged = make_model(tmp_path / "merged", "qwen3", vocab_size=261)
    vocabulary.tokenizer.save_pretrained(merged)
    with pytest.raises(InputError, match="brings the new token '<.call.>', and the model's tokenizer has it"):
        vocabulary_of(merged, [tmp_path / "adapter"])


def test_a_model_without_the_tokens_does_not_take_the_adapter(folder, tmp_path):
    trained(folder, adapter=tmp_path / "adapter")
    with pytest.raises(InputError, match="brings 2 new tokens, and the model was given none"):
        load_adapter(load_model(folder), tmp_path / "adapter")


def test_a_whole_embedding_takes_no_more_tokens(folder, tmp_path):
    trained(folder, adapter=tmp_path / "adapter", modules_to_save=["embed_tokens"])
    vocabulary = vocabulary_of(folder, [tmp_path / "adapter"], new_tokens=["more"])
    with pytest.raises(InputError, match="holds all of model.embed_tokens, without rows for the new tokens"):
        load_adapter(load_model(folder, new=vocabulary.new), tmp_path / "adapter")


@pytest.mark.parametrize("said", ["x", [1], [{"id": "1", "text": "a", "special": False}], [{"id": 1}]])
def test_a_damaged_list_of_new_tokens_is_told_with_its_file(folder, tmp_path, said):
    trained(folder, adapter=tmp_path / "adapter")
    file = tmp_path / "adapter" / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"new_tokens": said}))
    with pytest.raises(InputError, match="adapter_config.json: new_tokens is .* has to be a list"):
        vocabulary_of(folder, [tmp_path / "adapter"])


def test_rows_that_are_not_as_many_as_the_tokens_are_refused(folder, tmp_path):
    trained(folder, adapter=tmp_path / "adapter")
    file = tmp_path / "adapter" / "adapters.safetensors"
    arrays = mx.load(str(file))
    arrays["model.embed_tokens.new_rows"] = arrays["model.embed_tokens.new_rows"][:1]
    mx.save_safetensors(str(file), arrays)
    model = load_model(folder, new=vocabulary_of(folder, [tmp_path / "adapter"]).new)
    with pytest.raises(InputError, match="in another shape: model.embed_tokens.new_rows"):
        load_adapter(model, tmp_path / "adapter")


def test_stock_mlx_lm_names_the_rows_that_it_does_not_load(folder, tmp_path):
    import mlx_lm

    trained(folder, adapter=tmp_path / "adapter")
    with pytest.raises(ValueError, match="model.embed_tokens.new_rows: not an adapter parameter"):
        mlx_lm.load(str(folder), adapter_path=str(tmp_path / "adapter"))


@pytest.mark.parametrize("size", [VOCAB_SIZE, 300], ids=["full", "padded"])
def test_stock_mlx_lm_loads_whole_weights_where_the_vocabulary_has_room(tmp_path, size):
    import mlx_lm

    folder, adapter = make_model(tmp_path / "base", "qwen3", vocab_size=size), tmp_path / "adapter"
    model, _ = trained(folder, adapter=adapter, kind="full", rank=None, targets=None)
    if size == VOCAB_SIZE:
        with pytest.raises(ValueError, match="embed_tokens.weight: adapter shape"):
            mlx_lm.load(str(folder), adapter_path=str(adapter))
        return
    shutil.copytree(folder, tmp_path / "with tokenizer")
    for file in adapter.glob("tokenizer*"):
        shutil.copy(file, tmp_path / "with tokenizer")
    loaded, tokenizer = mlx_lm.load(str(tmp_path / "with tokenizer"), adapter_path=str(adapter))
    assert tokenizer.encode(CALL) == [259]
    assert mx.allclose(loaded(TOKENS), model(TOKENS), rtol=1e-5, atol=1e-5)


def test_pefts_layout_has_no_word_for_rows_but_for_whole_tables(folder, tmp_path):
    model, _ = trained(folder)
    with pytest.raises(InputError, match="PEFT's layout has no rows of new tokens .*modules_to_save"):
        save_peft_adapter(tmp_path / "peft", model, str(folder))
    model, _ = trained(folder, modules_to_save=["embed_tokens"])
    save_peft_adapter(tmp_path / "peft", model, str(folder))
    saved = mx.load(str(tmp_path / "peft" / "adapter_model.safetensors"))
    assert saved["base_model.model.model.embed_tokens.weight"].shape == (261, 64)
    new = vocabulary_of(folder, [tmp_path / "peft"], new_tokens=[CALL, RESULT]).new  # it does not say which
    again = load_model(folder, new=new)
    load_adapter(again, tmp_path / "peft")
    assert mx.allclose(again(TOKENS), model(TOKENS), rtol=1e-5, atol=1e-5)


def test_the_report_counts_rows_and_says_how_many_tokens(tmp_path):
    folder = make_model(tmp_path / "base", "llama")
    new = vocabulary_of(folder, new_tokens=[CALL, RESULT]).new
    model, plain = load_model(folder, new=new), load_model(folder)
    report, without = (apply_adapter(each, AdapterConfig(rank=2)) for each in (model, plain))
    assert report.num_trainable == without.num_trainable + 2 * 2 * 64  # embedding and head
    assert str(report).endswith("; rows of new tokens: 2")
    assert sum(isinstance(module, NewRows) for module in model.modules()) == 2
