"""lm-eval's scores of a model through mlxft beside those through mlx-lm's own adapter class, in float32.

    python benchmarks/lm_eval_scores.py --model FOLDER --questions mmlu.jsonl [--answers written.jsonl]
        [--limit 40] [--num-fewshot 0]

--questions: rows with question, choices and answer (a letter). Two tasks are made of them: `letters` (the
choices are listed and a letter is the answer) and `texts` (each choice's text is scored). --answers: rows
with question and answer; the task `written` has an answer written and compared. Said are both scores of each
task, the largest difference of a log-likelihood, and how many tokens scoring forwarded: mlxft shares what
choices and questions begin with, within --batch-tokens; mlx-lm forwards each question's context once and each
choice after it.
"""

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

_MADE_OF_FILE = """\
task: {task}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
test_split: test
fewshot_split: test
fewshot_config: {{sampler: first_n}}
"""
_LETTERS = """\
output_type: multiple_choice
doc_to_text: "{{question.strip()}}{% for each in choices %}\\n{{'ABCD'[loop.index0]}}. {{each}}\\
  {% endfor %}\\nAnswer:"
doc_to_choice: ["A", "B", "C", "D"]
doc_to_target: answer
metric_list: [{metric: acc}]
"""
_TEXTS = """\
output_type: multiple_choice
doc_to_text: "Question: {{question.strip()}}\\nAnswer:"
doc_to_choice: choices
doc_to_target: "{{['A', 'B', 'C', 'D'].index(answer)}}"
metric_list: [{metric: acc}, {metric: acc_norm}]
"""
_WRITTEN = """\
output_type: generate_until
doc_to_text: "Question: {{question.strip()}}\\nAnswer:"
doc_to_target: answer
generation_kwargs: {until: ["\\n"], max_gen_toks: 24}
metric_list: [{metric: exact_match}]
"""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True)
    parser.add_argument("--questions", required=True)
    parser.add_argument("--answers")
    parser.add_argument("--limit", type=int, default=40)
    parser.add_argument("--num-fewshot", type=int, default=0)
    parser.add_argument("--batch-tokens", type=int, default=2048)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        tasks = written_tasks(Path(folder), options)
        ours, theirs = of_mlxft(options, tasks), of_mlx_lm(options, tasks)
    show(ours, theirs)


def written_tasks(folder: Path, options: argparse.Namespace) -> list[str]:
    """Returns the YAML files of the tasks."""
    wanted = {"letters": (_LETTERS, options.questions), "texts": (_TEXTS, options.questions)}
    if options.answers:
        wanted["written"] = (_WRITTEN, options.answers)
    for task, (body, file) in wanted.items():
        path = Path(file).absolute()
        (folder / f"{task}.yaml").write_text(_MADE_OF_FILE.format(task=task, file=path) + body)
    return [str(folder / f"{task}.yaml") for task in wanted]


def of_mlxft(options: argparse.Namespace, tasks: list[str]) -> dict[str, Any]:
    """Returns the scores, log-likelihoods and tokens forwarded through mlxft."""
    from mlxft.evaluation.continuations import Scorer
    from mlxft.evaluation.harness import HarnessModel, Tasks, evaluate_tasks
    from mlxft.models import load
    from mlxft.models.decoder import view

    model, tokenizer = load(options.model, dtype="float32")
    scorer = Scorer(view(model), batch_tokens=options.batch_tokens)
    lm = HarnessModel(scorer, tokenizer)
    kept = keep_likelihoods(lm)
    found = evaluate_tasks(lm, Tasks(tasks), num_fewshot=options.num_fewshot, limit=options.limit)
    return {"scores": found.tasks, "logps": kept, "forwarded": scorer.forwarded, "alone": scorer.alone}


def of_mlx_lm(options: argparse.Namespace, tasks: list[str]) -> dict[str, Any]:
    """Returns the same through mlx-lm's adapter class, the tokens counted where its model is called."""
    import mlx.core as mx
    from lm_eval import simple_evaluate
    from mlx_lm.evaluate import MLXLM

    from mlxft.evaluation.harness import Tasks

    lm = MLXLM(options.model, use_chat_template=False)
    lm._model.set_dtype(mx.float32)
    kept, counted = keep_likelihoods(lm), count_tokens(lm)
    loaded = Tasks(tasks)
    found = simple_evaluate(
        lm,
        tasks=list(loaded.loaded["tasks"]),
        task_manager=loaded,
        num_fewshot=options.num_fewshot,
        limit=options.limit,
        log_samples=False,
        torch_random_seed=None,
    )
    return {"scores": found["results"], "logps": kept, "forwarded": counted["scoring"]}


def keep_likelihoods(lm: Any) -> list[tuple[float, bool]]:
    """Returns a list that fills with whatever `lm.loglikelihood` answers."""
    kept: list[tuple[float, bool]] = []
    score = lm.loglikelihood

    def keeping(requests: list, **rest: Any) -> list:
        made = score(requests, **rest)
        kept.extend(made)
        return made

    lm.loglikelihood = keeping
    return kept


def count_tokens(lm: Any) -> dict[str, int]:
    """Returns a count that grows with the tokens that scoring forwards."""
    counted = {"scoring": 0}
    score, model = lm.loglikelihood, lm._model

    class Counting:
        def __call__(self, tokens: Any, *rest: Any, **more: Any) -> Any:
            counted["scoring"] += tokens.size
            return model(tokens, *rest, **more)

        def __getattr__(self, name: str) -> Any:
            return getattr(model, name)

    def counting(requests: list, **rest: Any) -> list:
        lm._model = Counting()
        try:
            return score(requests, **rest)
        finally:
            lm._model = model

    lm.loglikelihood = counting
    return counted


def show(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    """Prints one line a score, then what the log-likelihoods say."""
    for task, metrics in theirs["scores"].items():
        for metric, value in metrics.items():
            if isinstance(value, float):
                own = ours["scores"][task][metric]
                same = "equal" if own == value else "DIFFERENT"
                print(f"{task:<8} {metric:<26} mlxft {own:.6f} mlx-lm {value:.6f} {same}")
    pairs = list(zip(ours["logps"], theirs["logps"], strict=True))
    apart = max(abs(own[0] - other[0]) for own, other in pairs)
    greedy = sum(bool(own[1]) != bool(other[1]) for own, other in pairs)
    print(f"{len(pairs)} log-likelihoods: largest difference {apart:.2e} nats, {greedy} greedy flags differ")
    tokens = {"mlxft": ours["forwarded"], "mlx-lm": theirs["forwarded"], "a forward a choice": ours["alone"]}
    print(json.dumps(tokens))


if __name__ == "__main__":
    main()
