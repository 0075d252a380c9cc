"""lm-eval's tasks on a model of ours: the same scores and log-likelihoods as mlx-lm's own adapter class."""

import json

import mlx.core as mx
import numpy as np
import pytest
from lm_eval import simple_evaluate
from lm_eval.api.instance import Instance
from mlx_lm.evaluate import MLXLM

from mlxft.errors import InputError
from mlxft.evaluation.continuations import Continuation, Scorer
from mlxft.evaluation.harness import HarnessModel, Tasks, evaluate_tasks
from mlxft.models import load
from mlxft.models.adapters import load_adapter
from mlxft.models.decoder import view
from tests.command import environment, mlxft
from tests.evaluation.made import alone as alone_of
from tests.evaluation.made import make_adapter, make_speaker
from tests.runs import write_rows

WORDS = ["red", "green", "blue", "yellow-ish"]
TASK = """\
task: {task}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
test_split: test
fewshot_split: test
fewshot_config: {{sampler: first_n}}
doc_to_text: "Question: {{{{question}}}}\\nAnswer:"
"""
CHOICES = """\
output_type: multiple_choice
doc_to_choice: choices
doc_to_target: answer
metric_list: [{metric: acc}, {metric: acc_norm}]
"""
WRITTEN = """\
output_type: generate_until
doc_to_target: "{{choices[answer]}}"
generation_kwargs: {until: ["e"], max_gen_toks: 6}
metric_list: [{metric: exact_match}]
"""
ROLLING = """\
output_type: loglikelihood_rolling
doc_to_target: "{{question}}"
metric_list: [{metric: word_perplexity}]
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_speaker(tmp_path_factory.mktemp("speaker"))


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """The YAML files of three tasks by name, over rows of our own."""
    made = tmp_path_factory.mktemp("tasks")
    rows = [
        {"question": f"Which colour is thing {number}?", "choices": WORDS, "answer": number % 4}
        for number in range(10)
    ]
    data = write_rows(made / "rows.jsonl", rows)
    bodies = {"colours": CHOICES, "written": WRITTEN, "rolling": ROLLING}
    for task, body in bodies.items():
        (made / f"{task}.yaml").write_text(TASK.format(task=task, file=data) + body)
    return {task: str(made / f"{task}.yaml") for task in bodies}


def of_ours(folder, batch_tokens=4096, **rest):
    model, tokenizer = load(str(folder))
    return HarnessModel(Scorer(view(model), batch_tokens=batch_tokens), tokenizer, **rest)


def requests(kind, *arguments):
    return [Instance(kind, {}, each, number) for number, each in enumerate(arguments)]


@pytest.mark.parametrize("num_fewshot", [0, 2])
def test_tasks_score_as_through_mlx_lms_own_class(num_fewshot, folder, files):
    tasks = Tasks([files["colours"], files["written"]])
    ours = evaluate_tasks(of_ours(folder), tasks, num_fewshot=num_fewshot)
    theirs = simple_evaluate(
        MLXLM(str(folder), use_chat_template=False),
        tasks=list(tasks.loaded["tasks"]),
        task_manager=tasks,
        num_fewshot=num_fewshot,
        log_samples=False,
        torch_random_seed=None,
    )
    numbers = {(task, name) for task in theirs["results"] for name in theirs["results"][task] if "," in name}
    assert {name for _, name in numbers} >= {"acc,none", "acc_norm,none", "exact_match,none"}
    for task, name in numbers:
        assert ours.tasks[task][name] == theirs["results"][task][name], (task, name)


def test_log_likelihoods_are_those_of_mlx_lms_own_class(folder):
    todo = [(f"Thing {n} is", f" {word}") for n in range(4) for word in WORDS]
    asked = requests("loglikelihood", *todo)
    ours = of_ours(folder, batch_tokens=40).loglikelihood(asked, disable_tqdm=True)
    theirs = MLXLM(str(folder), use_chat_template=False).loglikelihood(asked)
    for own, other in zip(ours, theirs, strict=True):
        assert own[0] == pytest.approx(other[0], abs=1e-4)  # float32, in other shapes
        assert own[1] == bool(other[1])


def test_answers_are_those_of_mlx_lms_own_class_up_to_the_stop_string(folder):
    settings = {"until": ["e", "th"], "max_gen_toks": 30, "do_sample": False}
    asked = requests("generate_until", *((f"Thing {n} is", settings) for n in range(5)))
    ours = of_ours(folder, batch_size=2).generate_until(asked)
    assert ours == MLXLM(str(folder), use_chat_template=False).generate_until(asked)
    assert not any(stop in text for text in ours for stop in ("e", "th"))


def test_a_whole_text_is_scored_in_windows_of_the_models_positions(folder):
    text = "The plants are watered by Mara on every second day."
    lm = of_ours(folder, max_length=16)
    (found,) = lm.loglikelihood_rolling(requests("loglikelihood_rolling", (text,)))
    tokens = lm.tok_encode(text)
    model, expected = lm.scorer.view.model, 0.0
    for start in range(0, len(tokens), 16):
        stop = min(start + 16, len(tokens))
        # A window's inputs are the 16 tokens before its last: of the last, shorter one too.
        first = max(stop - 16, 0) if start else 0
        row = [lm.prefix_token_id, *tokens[:stop]][first : stop + 1]
        logits = model(mx.array([row[:-1]]))[0].astype(mx.float32)
        logps = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
        expected += sum(logps[place - stop, tokens[place]].item() for place in range(start, stop))
    assert found == pytest.approx(expected, abs=1e-3)


def test_of_a_context_that_is_too_long_the_last_tokens_are_taken(folder):
    short, long = of_ours(folder, max_length=10), of_ours(folder)
    (cut,) = short.loglikelihood(requests("loglikelihood", ("x" * 30, "yz")), disable_tqdm=True)
    (same,) = long.loglikelihood(requests("loglikelihood", ("x" * 9, "yz")), disable_tqdm=True)
    assert short.num_cut == 1
    assert cut[0] == pytest.approx(same[0], abs=1e-5)


def test_an_empty_context_is_the_token_that_texts_begin_with(folder):
    lm = of_ours(folder)
    (found,) = lm.loglikelihood(requests("loglikelihood", ("", "abc")), disable_tqdm=True)
    context, tokens = (np.array(each, np.int32) for each in ([lm.prefix_token_id], lm.tok_encode("abc")))
    each = Continuation(context, tokens)
    assert found[0] == pytest.approx(alone_of(lm.scorer.view.model, each)[0], abs=1e-4)


def test_the_command_runs_tasks_on_an_adapter_beside_its_base(folder, files, tmp_path):
    adapter = make_adapter(tmp_path / "adapter", folder)
    overrides = [f"model.path={folder}", f"adapter.init_from={adapter}", "eval.reference=base"]
    done = mlxft(
        "eval", *overrides, f"eval.tasks=[{files['colours']}]", "eval.limit=6", "--json", folder=tmp_path
    )
    assert done.returncode == 0, done.stderr
    made = json.loads(done.stdout)
    model, tokenizer = load(str(folder))
    load_adapter(model, adapter)
    lm = HarnessModel(Scorer(view(model)), tokenizer)
    expected = evaluate_tasks(lm, Tasks([files["colours"]]), limit=6).tasks["colours"]["acc,none"]
    assert made["tasks"]["colours"]["acc,none"] == expected
    base = evaluate_tasks(of_ours(folder), Tasks([files["colours"]]), limit=6)
    assert made["reference"]["tasks"]["colours"]["acc,none"] == base.tasks["colours"]["acc,none"]
    assert made["forwarded"] < made["alone"]


@pytest.mark.parametrize(
    ("task", "told"),
    [
        ("arc_eazy", "lm-eval has no such task, and it is no YAML file. Near it: .*arc_easy"),
        ("missing.yaml", "there is no such file"),
    ],
)
def test_a_task_that_is_not_there_is_told(task, told):
    with pytest.raises(InputError, match=told):
        Tasks([task])


def test_a_task_whose_data_are_not_there_is_told(tmp_path):
    file = tmp_path / "task.yaml"
    file.write_text(TASK.format(task="lost", file=tmp_path / "lost.jsonl") + CHOICES)
    with pytest.raises(InputError, match="the tasks cannot be loaded: .*Their data come from"):
        Tasks([str(file)])


def test_without_lm_eval_the_command_says_what_to_install(folder, tmp_path):
    (tmp_path / "lm_eval.py").write_text("raise ModuleNotFoundError('gone', name='lm_eval')\n")
    shadowed = environment()
    shadowed["PYTHONPATH"] = f"{tmp_path}:{shadowed['PYTHONPATH']}"
    done = mlxft("eval", f"model.path={folder}", "eval.tasks=arc_easy", folder=tmp_path, env=shadowed)
    assert done.returncode == 2
    assert "pip install -e '.[lm-eval]'" in done.stderr and "Traceback" not in done.stderr
