"""Questions with answers to check: who is right by the model's own logits, and what counts as right."""

import json

import mlx.core as mx
import numpy as np
import pytest

from mlxft.config import compose
from mlxft.data.questions import CodeQuestion
from mlxft.errors import InputError
from mlxft.evaluation.command import evaluate_config
from mlxft.evaluation.generate import answer, prompt_tokens
from mlxft.evaluation.questions import normalised, program
from mlxft.evaluation.sandbox import run
from mlxft.models import load
from mlxft.models.adapters import load_adapter
from tests.command import mlxft
from tests.evaluation.made import make_adapter, make_speaker
from tests.runs import write_rows

CHOICES = ["yes", "perhaps not", "no"]
QUESTIONS = [f"Is {number} a prime number?" for number in range(12)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_speaker(tmp_path_factory.mktemp("speaker"))


@pytest.fixture(scope="module")
def adapter(folder, tmp_path_factory):
    return make_adapter(tmp_path_factory.mktemp("adapter"), folder)


def configured(folder, data, *overrides):
    composed = compose([f"model.path={folder}", f"data.valid={data}", *overrides], command="eval")
    return evaluate_config(composed.config, composed.own.eval)


def logp(model, context, tokens):
    row = np.concatenate([context, tokens])
    logits = np.array(model(mx.array(row)[None])[0, len(context) - 1 : -1].astype(mx.float32), np.float64)
    logps = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
    return logps[np.arange(len(tokens)), tokens].sum()


def choice_logps(model, tokenizer, chat):
    """Returns (questions, choices) log p of each choice after its question."""
    made = []
    for question in QUESTIONS:
        context = prompt_tokens(tokenizer, question) if chat else tokenizer.encode(question)
        texts = CHOICES if chat else [f" {choice}" for choice in CHOICES]
        made.append([logp(model, context, tokenizer.encode(text)) for text in texts])
    return np.array(made)


@pytest.mark.parametrize("chat", [True, False])
def test_the_likeliest_choice_is_that_of_the_models_own_logits(chat, folder, tmp_path):
    model, tokenizer = load(str(folder))
    logps = choice_logps(model, tokenizer, chat)
    right = [number % 3 for number in range(12)]
    rows = [{"question": q, "choices": CHOICES, "answer": r} for q, r in zip(QUESTIONS, right, strict=True)]
    made = configured(folder, write_rows(tmp_path / "rows.jsonl", rows), f"eval.chat={str(chat).lower()}")
    acc = (logps.argmax(axis=1) == right).mean()
    by_length = logps / [len(choice) for choice in CHOICES]
    found = made.as_dict()
    assert found["acc"] == pytest.approx(acc)
    assert found["acc_stderr"] == pytest.approx((acc * (1 - acc) / 12) ** 0.5)
    assert found["acc_norm"] == pytest.approx((by_length.argmax(axis=1) == right).mean())


def test_an_answer_is_a_choices_text_number_or_letter(folder, tmp_path):
    rows = [{"question": "Q", "choices": CHOICES, "answer": each} for each in ("no", 2, "C", "c")]
    made = configured(folder, write_rows(tmp_path / "rows.jsonl", rows))
    assert made.as_dict()["acc"] in (0.0, 1.0)  # the same answer four times


def test_an_adapters_answers_stand_beside_its_bases(folder, adapter, tmp_path):
    model, tokenizer = load(str(folder))
    before = choice_logps(model, tokenizer, True).argmax(axis=1)
    load_adapter(model, adapter)
    now = choice_logps(model, tokenizer, True).argmax(axis=1)
    rows = [
        {"question": q, "choices": CHOICES, "answer": int(n if i % 2 else b)}
        for i, (q, n, b) in enumerate(zip(QUESTIONS, now, before, strict=True))
    ]
    data = write_rows(tmp_path / "rows.jsonl", rows)
    found = configured(folder, data, f"adapter.init_from={adapter}", "eval.reference=base").as_dict()
    right = np.array([row["answer"] for row in rows])
    assert found["acc"] == pytest.approx((now == right).mean())
    assert found["reference"]["acc"] == pytest.approx((before == right).mean())
    assert found["gained"] == ((now == right) & (before != right)).sum()
    assert found["lost"] == ((now != right) & (before == right)).sum()


def test_a_written_answer_is_the_models_own_and_compared_normalised(folder, tmp_path):
    model, tokenizer = load(str(folder))
    own = [answer(model, tokenizer, question, 6) for question in QUESTIONS[:4]]
    accepted = [own[0].upper(), [f"The {own[1]}!", "x"], own[2] + "x", f"not {own[3]}"]
    rows = [{"question": q, "answer": a} for q, a in zip(QUESTIONS, accepted, strict=False)]
    data = write_rows(tmp_path / "rows.jsonl", rows)
    made = configured(folder, data, "eval.max_tokens=6", "data.batch_size=3")
    assert made.as_dict()["exact_match"] == 0.5


def test_an_answer_can_be_taken_out_of_what_is_written(folder, tmp_path):
    model, tokenizer = load(str(folder))
    own = answer(model, tokenizer, QUESTIONS[0], 6)
    data = write_rows(tmp_path / "rows.jsonl", [{"question": QUESTIONS[0], "answer": own[-2:]}])
    assert configured(folder, data, "eval.max_tokens=6").as_dict()["exact_match"] == 0.0
    made = configured(folder, data, "eval.max_tokens=6", "eval.extract='.*(..)$'")
    assert made.as_dict()["exact_match"] == 1.0


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("The Mat.", "mat"),
        ("  an  answer,\nhere!", "answer here"),
        ("1,000.0 apples", "1000 apples"),
        ("$70", "70"),
        ("-3", "-3"),
        ("3.50", "3.5"),
        ("Ｐａｒｉｓ", "paris"),
        ("mother-in-law", "motherinlaw"),
    ],
)
def test_answers_are_compared_without_what_does_not_matter(written, meant):
    assert normalised(written) == normalised(meant) == meant


ADD = CodeQuestion(
    "import math\n\ndef twice(x):\n    return 2 * x\n\ndef add(a, b):\n",
    "def check(candidate):\n    assert candidate(2, 3) == 7",
    "add",
    "rows.jsonl:1",
)


@pytest.mark.parametrize(
    ("written", "passes"),
    [
        ("    return twice(a) + b", True),
        ("    return a + b", False),
        ("Here it is:\n```python\ndef add(a, b):\n    return twice(a) + b\n```\nDone.", True),
        ("```python\ndef add(a, b):\n    return math.floor(twice(a) + b)\n```", True),
        ("```\n    return twice(a) + b\n```", True),
    ],
)
def test_a_program_is_what_was_given_and_written_then_the_tests(written, passes):
    assert run(program(ADD, written), 10).passed == passes


def test_no_program_is_run_unless_it_was_said(folder, tmp_path):
    row = {"prompt": ADD.prompt, "test": ADD.test, "entry_point": "add"}
    data = write_rows(tmp_path / "rows.jsonl", [row])
    with pytest.raises(InputError, match="off unless you say eval.run_code=true"):
        configured(folder, data)
    made = configured(folder, data, "eval.run_code=true", "eval.max_tokens=5").as_dict()
    assert (made["pass_at_1"], made["questions"]) == (0.0, 1)


@pytest.mark.parametrize(
    ("row", "told"),
    [
        ({"choices": ["a", "b"], "answer": 2}, "answer is 2; it must be one of the 2 choices"),
        ({"choices": ["a", "a"], "answer": 0}, "two of the choices are the same text"),
        ({"choices": ["a"], "answer": 0}, "it must be a list of two texts or more"),
        ({"choices": "ab", "answer": 0}, "it must be a list of two texts or more"),
    ],
)
def test_a_faulty_row_is_told_with_its_line(row, told, folder, tmp_path):
    data = write_rows(tmp_path / "rows.jsonl", [{"question": "Q"} | row])
    with pytest.raises(InputError, match=f"rows.jsonl:1: .*{told}"):
        configured(folder, data)


def test_questions_are_not_trained_on_as_they_are(folder, tmp_path):
    data = write_rows(tmp_path / "rows.jsonl", [{"question": "Q", "answer": "A"}])
    done = mlxft("train", f"model.path={folder}", f"data.train={data}", folder=tmp_path)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert "which is for mlxft eval" in done.stderr
    assert "data.columns={prompt: question, completion: answer}" in done.stderr


def test_the_command_prints_both_columns_and_json(folder, adapter, tmp_path):
    rows = [{"question": q, "choices": CHOICES, "answer": 1} for q in QUESTIONS]
    data = write_rows(tmp_path / "rows.jsonl", rows)
    with_base = [f"adapter.init_from={adapter}", "eval.reference=base"]
    arguments = ["eval", f"model.path={folder}", f"data.valid={data}", *with_base, "eval.limit=5"]
    done = mlxft(*arguments, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "base -> adapter" in done.stdout and "questions: 5 -> 5" in done.stdout
    made = json.loads(mlxft(*arguments, "--json", folder=tmp_path).stdout)
    assert made["questions"] == 5 and made["reference"]["model"] == "base"
