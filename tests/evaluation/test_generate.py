"""Generation: greedy decoding against the model's plain forward, draws, prompts, adapters, the command."""

import json

import mlx.core as mx
import pytest

from mlxft.errors import InputError
from mlxft.evaluation.generate import Sampling, answer, prompt_tokens, stream
from mlxft.models import load
from mlxft.models.adapters import load_adapter
from tests.command import mlxft
from tests.evaluation.made import make_adapter, make_speaker, merged
from tests.tiny_models import END_ID

QUESTION = "Who are you?"
CHAT = "<|im_start|>user\nWho are you?<|im_end|>\n<|im_start|>assistant\n"  # by the tiny models' template


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_speaker(tmp_path_factory.mktemp("speaker"))


@pytest.fixture(scope="module")
def speaker(folder):
    return load(str(folder))


@pytest.fixture(scope="module")
def adapter(folder, tmp_path_factory):
    return make_adapter(tmp_path_factory.mktemp("adapter"), folder)


def likeliest(model, prompt, max_tokens):
    """Decodes by the plain forward over everything so far, without a cache; the end token included."""
    tokens = list(prompt)
    while len(tokens) - len(prompt) < max_tokens:
        tokens.append(model(mx.array([tokens]))[0, -1].argmax().item())
        if tokens[-1] == END_ID:
            break
    return tokens[len(prompt) :]


def drawn(speaker, **sampling):
    model, tokenizer = speaker
    prompt = prompt_tokens(tokenizer, QUESTION)
    return "".join(part.text for part in stream(model, tokenizer, prompt, Sampling(20, **sampling)))


def test_greedy_decoding_takes_the_likeliest_token_of_the_plain_forward(speaker):
    model, tokenizer = speaker
    prompt = prompt_tokens(tokenizer, QUESTION)
    expected = likeliest(model, prompt, 20)
    parts = list(stream(model, tokenizer, prompt, Sampling(20)))
    assert [part.token for part in parts] == expected
    assert parts[-1].finish_reason == "length"
    assert answer(model, tokenizer, QUESTION, 20) == tokenizer.decode(expected)


def test_the_end_token_ends_the_answer_and_is_no_part_of_it(tmp_path, speaker):
    model, tokenizer = speaker
    prompt = prompt_tokens(tokenizer, QUESTION)
    sixth = likeliest(model, prompt, 6)[-1]
    stopping, _ = load(str(make_speaker(tmp_path, stops_like=sixth)))
    expected = likeliest(stopping, prompt, 20)
    assert expected[-1] == END_ID and len(expected) <= 6
    parts = list(stream(stopping, tokenizer, prompt, Sampling(20)))
    assert [part.token for part in parts] == expected
    assert parts[-1].finish_reason == "stop"
    assert answer(stopping, tokenizer, QUESTION, 20) == tokenizer.decode(expected[:-1])


def test_an_answer_without_chance_leaves_the_random_state_alone(speaker):
    mx.random.seed(5)
    before = mx.random.state[0].tolist()
    answer(*speaker, QUESTION, 5)
    assert mx.random.state[0].tolist() == before


def test_the_same_seed_draws_the_same_answer(speaker):
    first = drawn(speaker, temperature=1.0, seed=1)
    assert drawn(speaker, temperature=1.0, seed=1) == first
    assert drawn(speaker, temperature=1.0, seed=2) != first


def test_the_smallest_top_p_leaves_only_the_likeliest_token(speaker):
    assert drawn(speaker, temperature=1.0, top_p=1e-6, seed=1) == drawn(speaker)


def test_a_question_is_a_turn_of_the_chat_template(speaker):
    _, tokenizer = speaker
    assert tokenizer.decode(prompt_tokens(tokenizer, QUESTION)) == CHAT
    with_system = tokenizer.decode(prompt_tokens(tokenizer, QUESTION, "Be brief."))
    assert with_system == "<|im_start|>system\nBe brief.<|im_end|>\n" + CHAT


def test_a_thinking_template_is_told_not_to_think_unless_asked(tmp_path):
    make_speaker(tmp_path)
    template = tmp_path / "chat_template.jinja"
    template.write_text(template.read_text() + "{% if not enable_thinking %}<no thoughts>{% endif %}")
    _, tokenizer = load(str(tmp_path))
    assert tokenizer.decode(prompt_tokens(tokenizer, QUESTION)) == CHAT + "<no thoughts>"
    assert tokenizer.decode(prompt_tokens(tokenizer, QUESTION, thinking=True)) == CHAT


def test_without_a_template_the_prompt_is_plain_text_and_a_system_turn_is_refused(tmp_path):
    make_speaker(tmp_path)
    (tmp_path / "chat_template.jinja").unlink()
    _, tokenizer = load(str(tmp_path))
    assert tokenizer.decode(prompt_tokens(tokenizer, QUESTION)) == QUESTION
    with pytest.raises(InputError, match="system: .* no chat template"):
        prompt_tokens(tokenizer, QUESTION, "Be brief.")


def test_a_template_that_refuses_a_system_turn_says_so_for_the_key(tmp_path):
    make_speaker(tmp_path)
    refusal = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system turns') }}{% endif %}"
    (tmp_path / "chat_template.jinja").write_text(refusal)
    _, tokenizer = load(str(tmp_path))
    with pytest.raises(InputError, match="^system: .* no system turns"):
        prompt_tokens(tokenizer, QUESTION, "Be brief.")


def test_an_adapted_model_answers_as_one_with_the_update_in_its_weights(folder, adapter, speaker):
    model, tokenizer = load(str(folder))
    load_adapter(model, adapter)
    prompt = prompt_tokens(tokenizer, QUESTION)
    expected = likeliest(merged(folder, model), prompt, 20)
    assert [part.token for part in stream(model, tokenizer, prompt, Sampling(20))] == expected
    assert expected != likeliest(speaker[0], prompt, 20)


def test_the_command_prints_the_answer_alone_and_speeds_beside_it(folder, adapter, speaker, tmp_path):
    model, tokenizer = load(str(folder))
    expected = {}
    expected["base"] = answer(model, tokenizer, QUESTION, 12)
    load_adapter(model, adapter)
    expected["adapted"] = answer(model, tokenizer, QUESTION, 12)
    assert expected["base"] != expected["adapted"]
    for name, extra in {"base": [], "adapted": [f"adapter.init_from={adapter}"]}.items():
        done = mlxft(
            "generate", f"model.path={folder}", f"prompt={QUESTION}", "max_tokens=12", *extra, folder=tmp_path
        )
        assert done.returncode == 0, done.stderr
        assert done.stdout == expected[name] + "\n"
        assert "answer: 12 tokens" in done.stderr and "(max_tokens reached)" in done.stderr


def test_an_adapter_that_does_not_fit_ends_the_command_with_exit_code_2(folder, adapter, tmp_path):
    config = json.loads((folder / "config.json").read_text())
    wide = make_speaker(tmp_path / "other")
    assert config["num_hidden_layers"] == 4
    weights = mx.load(str(adapter / "adapters.safetensors"))
    odd = tmp_path / "odd"
    odd.mkdir()
    (odd / "adapter_config.json").write_bytes((adapter / "adapter_config.json").read_bytes())
    mx.save_safetensors(
        str(odd / "adapters.safetensors"),
        {name.replace("layers.3", "layers.9"): w for name, w in weights.items()},
    )
    done = mlxft("generate", f"model.path={wide}", "prompt=hi", f"adapter.init_from={odd}", folder=tmp_path)
    assert done.returncode == 2
    assert done.stdout == ""
    assert "does not fit the model" in done.stderr and "Traceback" not in done.stderr


def test_a_missing_prompt_ends_the_command_with_exit_code_2(folder, tmp_path):
    done = mlxft("generate", f"model.path={folder}", folder=tmp_path)
    assert done.returncode == 2
    assert "prompt" in done.stderr and "Traceback" not in done.stderr
