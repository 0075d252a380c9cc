"""Answers written together: each as alone, up to its own end, stop string or number of tokens."""

import pytest

from mlxft.evaluation.answers import Question, answers
from mlxft.evaluation.generate import Sampling, prompt_tokens, stream
from mlxft.models import load
from tests.evaluation.made import make_speaker
from tests.tiny_models import make_model

ASKED = ["Hi", "Who waters the plants?", "Where is the key to the old garden gate?"]


def alone(model, tokenizer, prompt, max_tokens):
    return "".join(part.text for part in stream(model, tokenizer, prompt, Sampling(max_tokens)))


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "qwen3_5"])
def test_answers_written_together_are_those_written_alone(family, tmp_path):
    model, tokenizer = load(str(make_model(tmp_path, family)))
    prompts = [prompt_tokens(tokenizer, text) for text in ASKED]
    questions = [Question(prompt, Sampling(5 + 3 * n)) for n, prompt in enumerate(prompts)]
    made = answers(model, tokenizer, questions, batch_size=2)
    assert made == [alone(model, tokenizer, prompt, 5 + 3 * n) for n, prompt in enumerate(prompts)]


def test_an_answer_ends_before_the_first_of_its_own_stop_strings(tmp_path):
    model, tokenizer = load(str(make_speaker(tmp_path)))
    prompts = [prompt_tokens(tokenizer, text) for text in ASKED]
    whole = [alone(model, tokenizer, prompt, 20) for prompt in prompts]
    stops = [(text[7:9], text[12:14]) for text in whole[:2]] + [()]
    questions = [Question(p, Sampling(20), own) for p, own in zip(prompts, stops, strict=True)]
    made = answers(model, tokenizer, questions, batch_size=3)
    expected = [
        text[: min(text.find(stop) for stop in own)] for text, own in zip(whole, stops, strict=False) if own
    ]
    assert made == [*expected, whole[2]]


def test_the_same_seed_draws_the_same_answers(tmp_path):
    model, tokenizer = load(str(make_speaker(tmp_path)))
    questions = [Question(prompt_tokens(tokenizer, text), Sampling(20, 1.0)) for text in ASKED]
    first = answers(model, tokenizer, questions, batch_size=3, seed=1)
    assert answers(model, tokenizer, questions, batch_size=3, seed=1) == first
    assert answers(model, tokenizer, questions, batch_size=3, seed=2) != first


def test_no_questions_have_no_answers(tmp_path):
    assert answers(*load(str(make_speaker(tmp_path))), [], batch_size=3) == []
