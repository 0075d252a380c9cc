import json

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten
from tokenizers import Tokenizer

from mlxft.errors import InputError
from mlxft.models.gguf_families import rows_as_halves
from mlxft.models.gguf_vocabulary import tokenizer_of
from mlxft.models.gguf_weights import convert
from mlxft.models.load import load
from mlxft.models.resolve import resolve
from tests.tiny_gguf import tiny_llama, write_gguf
from tests.tiny_models import END_ID, START_ID

IDS = mx.array([[5, 80, 7, 200, 31, 9]])


@pytest.fixture
def out(tmp_path):
    (tmp_path / "out").mkdir()
    return tmp_path / "out"


@pytest.mark.parametrize("tied", [False, True])
def test_a_float32_file_gives_the_models_own_logits(tmp_path, out, tied):
    convert(write_gguf(tmp_path / "m.gguf", tied=tied), out)
    _, original = tiny_llama(tied)
    original.set_dtype(mx.bfloat16)
    original.set_dtype(mx.float32)  # what bfloat16 kept of the weights
    model, _ = load(str(out), dtype="float32")
    assert mx.array_equal(model(IDS), original(IDS))


# A code is off by half a step at most; 8 bits in 32 values: step = largest / 127, 4 bits: range / 15.
@pytest.mark.parametrize("kind, step", [
    ("Q8_0", lambda group: np.abs(group).max(-1) / 127), ("Q4_1", lambda group: np.ptp(group, -1) / 15)])
def test_packed_weights_are_unpacked_within_half_a_step(tmp_path, out, kind, step):
    convert(write_gguf(tmp_path / "m.gguf", kind), out)
    weights = mx.load(str(out / "model.safetensors"))
    _, original = tiny_llama()
    for name, array in tree_flatten(original.parameters()):
        ours = np.array(weights[name].astype(mx.float32))
        true = np.array(array)
        assert weights[name].dtype == mx.bfloat16 and ours.shape == true.shape
        groups = true.reshape(-1, 32)
        limit = (0 if array.ndim == 1 else step(groups)[:, None] / 2) + np.abs(groups) * 2.0 ** -8
        assert (np.abs(ours.reshape(-1, 32) - groups) <= limit * 1.02 + 1e-6).all()


def test_config_and_tokenizer_are_those_of_the_file(tmp_path, out):
    convert(write_gguf(tmp_path / "m.gguf"), out)
    expected, _ = tiny_llama()
    config = json.loads((out / "config.json").read_text())
    assert {key: config[key] for key in expected} == expected
    _, tokenizer = load(str(out))
    assert tokenizer.encode("Hi 12") == [259, 32 + 3, 49 + 3, 50 + 3]
    assert tokenizer.eos_token_ids == {END_ID} and tokenizer.bos_token_id == START_ID
    ids = tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}])
    assert ids == [START_ID, *tokenizer.encode("user\nHi"), END_ID, 10 + 3]


def test_interleaved_rows_become_halves():
    rows = np.array([[0], [2], [1], [3], [4], [6], [5], [7]])  # two heads of four rows
    assert rows_as_halves(rows, 2)[:, 0].tolist() == [0, 1, 2, 3, 4, 5, 6, 7]


@pytest.mark.parametrize("changes, message", [
    ({"architecture": "phi3"}, "models of architecture 'phi3' are not read from GGUF here, only llama"),
    ({"pre": "tekken"}, r"its tokenizer \(gpt2, tekken\) cannot be converted"),
    ({"extra_tensor": "rope_freqs.weight"}, "the factors in rope_freqs.weight are none of Llama 3's"),
    ({"extra_tensor": "blk.0.attn_sinks.weight"}, "the tensor blk.0.attn_sinks.weight has no counterpart"),
])
def test_what_cannot_be_converted_is_named(tmp_path, out, changes, message):
    with pytest.raises(InputError, match=f"m.gguf: {message}"):
        convert(write_gguf(tmp_path / "m.gguf", **changes), out)
    assert not list(out.iterdir())


@pytest.mark.parametrize("content", [b"", b"GGUF", b"not a model" * 20])
def test_a_file_that_is_no_gguf_is_named(tmp_path, out, content):
    (tmp_path / "m.gguf").write_bytes(content)
    with pytest.raises(InputError, match="m.gguf is no readable GGUF file"):
        convert(tmp_path / "m.gguf", out)


def test_a_truncated_file_is_named(tmp_path, out):
    whole = write_gguf(tmp_path / "m.gguf").read_bytes()
    (tmp_path / "m.gguf").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(InputError, match="m.gguf is no readable GGUF file"):
        convert(tmp_path / "m.gguf", out)


def pieces(tokens, scores, **more):
    """The tokenizer of a vocabulary of pieces: <unk>, a beginning, a token a byte, then `tokens`."""
    every = ["<unk>", "<s>", *(f"<0x{byte:02X}>" for byte in range(256)), *tokens]
    types = [2, 3, *[6] * 256, *[1] * len(tokens)]
    fields = {"model": "llama", "tokens": every, "token_type": types, "scores": [0.0] * 258 + scores,
              "bos_token_id": 1, "unknown_token_id": 0} | more  # fmt: skip
    made = tokenizer_of({f"tokenizer.ggml.{name}": value for name, value in fields.items()})
    return Tokenizer.from_str(json.dumps(made)), every


def test_pieces_of_the_highest_score_are_joined_first():
    tokens = ["▁", "a", "b", "c", "ab", "bc", "▁a"]
    made, every = pieces(tokens, [0.0] * 4 + [-2.0, -1.0, -3.0])
    assert made.encode("abc").tokens == ["<s>", "▁a", "bc"]  # bc before ab, though it stands behind it
    made, _ = pieces(tokens, [0.0] * 4 + [-1.0, -2.0, -3.0])
    assert made.encode("abc").tokens == ["<s>", "▁", "ab", "c"]


def test_bytes_stand_in_for_characters_that_no_piece_has():
    made, every = pieces(["▁", "a"], [0.0, 0.0])
    ids = made.encode("a é").ids
    assert [every[number] for number in ids] == ["<s>", "▁", "a", "▁", "<0xC3>", "<0xA9>"]
    assert made.decode(ids) == "a é"


def test_a_vocabulary_says_whether_texts_begin_with_a_space_and_a_token():
    made, _ = pieces(["▁", "a"], [0.0, 0.0], add_space_prefix=False, add_bos_token=False)
    assert made.encode("a a").tokens == ["a", "▁", "a"]


@pytest.mark.parametrize("cut, words", [
    ("gpt-2", ["ab", "12345"]), ("smollm", ["ab", *"12345"]), ("llama-bpe", ["ab", "123", "45"]),
    ("qwen2", ["ab", *"12345"])])  # fmt: skip
def test_text_is_cut_as_the_vocabularys_name_says(cut, words):
    fields = {"model": "gpt2", "pre": cut, "tokens": [*"ab12345", "!"], "token_type": [1] * 8,
              "merges": ["a b"]}  # fmt: skip
    made = tokenizer_of({f"tokenizer.ggml.{name}": value for name, value in fields.items()})
    cutter = Tokenizer.from_str(json.dumps(made)).pre_tokenizer
    assert [word for word, _ in cutter.pre_tokenize_str("ab12345")] == words


def test_a_file_is_given_as_a_models_path_and_converted_once(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    file = write_gguf(tmp_path / "tiny.gguf")
    folder = resolve(str(file))
    written = (folder / "model.safetensors").stat().st_mtime_ns
    assert resolve(str(file)) == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == written
    model, tokenizer = load(str(file), dtype="float32")
    again, _ = load(str(folder), dtype="float32")
    assert mx.array_equal(model(IDS), again(IDS)) and tokenizer.encode("Hi") == [259]
    other = write_gguf(tmp_path / "tiny.gguf", "Q8_0")
    assert resolve(str(other)) != folder
    (tmp_path / "bad.gguf").write_bytes(b"GGUF")
    with pytest.raises(InputError, match="bad.gguf is no readable GGUF file"):
        resolve(str(tmp_path / "bad.gguf"))
