import mlx.core as mx
import mlx_lm
import pytest

from tests.tiny_models import END_ID, FAMILIES, START_ID, make_model


@pytest.mark.parametrize("family", FAMILIES)
def test_a_tiny_model_is_a_folder_that_mlx_lm_loads(tmp_path, family):
    folder = make_model(tmp_path / "model", family)
    model, tokenizer = mlx_lm.load(str(folder))
    logits = model(mx.array([tokenizer.encode("Hello")]))
    assert logits.shape == (1, 5, 259) and mx.isfinite(logits).all()
    assert logits.std().item() > 0.3  # far from uniform: a wrong mask or position changes it


def test_the_same_seed_gives_the_same_bytes_and_another_seed_others(tmp_path):
    files = [make_model(tmp_path / str(i), "llama", seed=seed) / "model.safetensors"
             for i, seed in enumerate([0, 0, 1])]
    first, again, other = (f.read_bytes() for f in files)
    assert first == again != other


def test_making_a_model_leaves_the_global_generator_alone(tmp_path):
    mx.random.seed(7)
    expected = mx.random.uniform(shape=(4,))
    mx.random.seed(7)
    make_model(tmp_path / "model", "llama")
    assert mx.array_equal(mx.random.uniform(shape=(4,)), expected)


def test_the_tokenizer_has_a_token_a_byte_and_a_chat_template(tmp_path):
    _, tokenizer = mlx_lm.load(str(make_model(tmp_path / "model", "qwen3")))
    assert tokenizer.encode("Aé") == [65 + 3, 0xC3 + 3, 0xA9 + 3]
    assert tokenizer.decode(tokenizer.encode(" two  spaces\n")) == " two  spaces\n"
    ids = tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}], add_generation_prompt=True)
    text = "user\nHi", "\n", "assistant\n"
    user, newline, assistant = (tokenizer.encode(t) for t in text)
    assert ids == [START_ID, *user, END_ID, *newline, START_ID, *assistant]
    assert tokenizer.eos_token_ids == {END_ID}
