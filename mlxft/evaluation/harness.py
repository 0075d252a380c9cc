"""Tasks of EleutherAI's lm-eval on a model of ours, with its adapter: `eval.tasks`, or `HarnessModel`.

lm-eval brings prompts, few-shot examples and metrics; this gives it log-probabilities and answers.
"""

import difflib
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Optional

import numpy as np
from lm_eval import simple_evaluate
from lm_eval.api.model import TemplateLM
from lm_eval.tasks import TaskManager
from lm_eval.tasks._yaml_loader import load_yaml
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from mlxft.errors import InputError
from mlxft.evaluation.answers import Question, answers
from mlxft.evaluation.continuations import Continuation, Scorer
from mlxft.evaluation.generate import Sampling

log = logging.getLogger("mlxft")

_MOST_TOKENS = 256  # of an answer, where a task doesn't say


class HarnessModel(TemplateLM):
    """What lm-eval calls a model. It holds logits of one chunk of tokens at a time.

    scorer: with the model's view. tokenizer: mlx-lm's. max_length: tokens of context and continuation
    together, None for no limit; of longer contexts the last are taken. batch_size: answers written at once.
    """

    def __init__(self, scorer: Scorer, tokenizer: Any, max_length: Optional[int] = None, batch_size: int = 4):
        super().__init__()
        self.scorer, self.tokenizer = scorer, tokenizer
        self.max_length, self.batch_size = max_length, batch_size
        self.num_cut = 0  # contexts that were too long

    @property
    def eot_token_id(self) -> int:
        """The token that ends a text."""
        return self.tokenizer.eos_token_id

    @property
    def prefix_token_id(self) -> int:
        """The token that what has no context comes after."""
        begin = self.tokenizer.bos_token_id
        return self.eot_token_id if begin is None else begin

    @property
    def tokenizer_name(self) -> str:
        """The name that lm-eval keeps requests by."""
        return str(self.tokenizer.name_or_path).replace("/", "__")

    def tok_encode(self, string: str, add_special_tokens: Optional[bool] = None, **_: Any) -> list[int]:
        """Returns the text's tokens, with those that the tokenizer begins a text with unless it has them."""
        if add_special_tokens is None:
            begin = self.tokenizer.bos_token
            add_special_tokens = not (begin and string.startswith(begin))
        return list(self.tokenizer.encode(string, add_special_tokens=add_special_tokens))

    def apply_chat_template(self, chat_history: list[dict], add_generation_prompt: bool = True) -> str:
        """Returns the turns as the model's template writes them; one that can think first is told not to."""
        return self.tokenizer.apply_chat_template(
            chat_history,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt,
            enable_thinking=False,
        )

    def _loglikelihood_tokens(self, requests: Sequence[tuple], **_: Any) -> list[tuple[float, bool]]:
        scores = self.scorer([self._fitted(context, tokens) for _, context, tokens in requests])
        return [(score.logp, score.is_greedy) for score in scores]

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """Returns log p of each whole text, cut into windows where it is longer than the model takes."""
        windows, owners = [], []
        for number, request in enumerate(requests):
            tokens = self.tok_encode(request.args[0])
            length = self.max_length or max(len(tokens), 1)
            for pair in get_rolling_token_windows(tokens, self.prefix_token_id, length, 1):
                windows.append(Continuation(*map(_tokens, make_disjoint_window(pair))))
                owners.append(number)
        sums = np.zeros(len(requests))
        np.add.at(sums, owners, [score.logp for score in self.scorer(windows)])
        return sums.tolist()

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Returns the answers to the requests' contexts, up to the stop strings that a task names."""
        questions = [self._question(*request.args) for request in requests]
        made = answers(self.scorer.view.model, self.tokenizer, questions, self.batch_size)
        return [self._without_thoughts(text) for text in made]

    def _question(self, context: str, settings: dict[str, Any]) -> Question:
        until = settings.get("until") or []
        stops = (until,) if isinstance(until, str) else tuple(until)
        max_tokens = int(settings.get("max_gen_toks") or settings.get("max_tokens") or _MOST_TOKENS)
        draws = settings.get("do_sample", float(settings.get("temperature") or 0) > 0)
        temperature = float(settings.get("temperature") or 1.0) if draws else 0.0
        prompt = self.tok_encode(context) or [self.prefix_token_id]
        if self.max_length is not None:
            prompt = self._last(prompt, max(self.max_length - max_tokens, 1))
        sampling = Sampling(max_tokens, temperature, float(settings.get("top_p") or 1.0))
        return Question(prompt, sampling, tuple(filter(None, stops)))

    def _fitted(self, context: Sequence[int], tokens: Sequence[int]) -> Continuation:
        if self.max_length is not None:
            if len(tokens) > self.max_length:
                raise InputError(
                    f"eval.tasks: a continuation of {len(tokens):,} tokens is longer than the model's "
                    f"{self.max_length:,} positions"
                )
            context = self._last(context, self.max_length + 1 - len(tokens))  # the last token isn't forwarded
        return Continuation(_tokens(context), _tokens(tokens))

    def _last(self, context: Sequence[int], length: int) -> Sequence[int]:
        self.num_cut += len(context) > length
        return context[-length:]

    def _without_thoughts(self, text: str) -> str:
        end = self.tokenizer.think_end if getattr(self.tokenizer, "has_thinking", False) else None
        return text.partition(end)[2] if end and end in text else text


def _tokens(values: Sequence[int]) -> np.ndarray:
    return np.array(values, np.int32)


@dataclass(frozen=True)
class TaskEvaluation:
    """What a model makes of tasks.

    tasks: metrics of each by name, "acc,none" as lm-eval writes them, with their standard errors. forwarded:
    tokens that scoring took; alone: with a forward for each choice.
    """

    tasks: dict[str, dict[str, Any]]
    forwarded: int
    alone: int
    seconds: float

    def as_dict(self) -> dict[str, Any]:
        """Returns everything by name."""
        return {
            "tasks": self.tasks,
            "forwarded": self.forwarded,
            "alone": self.alone,
            "seconds": self.seconds,
        }

    def lines(self) -> list[tuple[str, str]]:
        """Returns (name, value) as text, for people."""
        lines = [
            (f"{task} {metric.removesuffix(',none')}", _with_error(metrics, metric))
            for task, metrics in self.tasks.items()
            for metric, value in metrics.items()
            if isinstance(value, float) and "_stderr" not in metric
        ]
        if self.alone:
            lines.append(("scored", f"{self.forwarded:,} tokens; {self.alone:,} with a forward a choice"))
        return [*lines, ("seconds", f"{self.seconds:.1f}")]


def _with_error(metrics: dict[str, Any], metric: str) -> str:
    name, _, rest = metric.partition(",")
    error = metrics.get(f"{name}_stderr,{rest}")
    return f"{metrics[metric]:.4f}" + (f" ± {error:.4f}" if isinstance(error, float) else "")


class Tasks(TaskManager):
    """lm-eval's tasks, and those of YAML files, loaded once; wrong ones are told in one sentence."""

    def __init__(self, names: Sequence[str]):
        # Reading the names of lm-eval's own thousands of tasks takes seconds.
        super().__init__(include_defaults=not all(map(_is_file, names)))
        self.loaded = self._load(names)

    def load(self, task_list: Any) -> Any:
        """Returns the tasks as lm-eval's `evaluate` takes them."""
        return self.loaded

    def _load(self, names: Sequence[str]) -> Any:
        found = [self._found(name) for name in names]
        try:
            loaded = super().load([each for some in found for each in some])
        except Exception as error:  # whatever datasets, the hub's client and a task's own code raise
            told = str(error).strip().partition("\n")[0]
            raise InputError(
                f"eval.tasks={','.join(names)}: the tasks cannot be loaded: {type(error).__name__}: {told}. "
                "Their data come from the hub, or from the files that a task's YAML names"
            ) from error
        unsafe = [name for name, task in loaded["tasks"].items() if getattr(task, "UNSAFE_CODE", False)]
        if unsafe:
            raise InputError(
                f"eval.tasks={','.join(unsafe)}: lm-eval runs what the model writes for these, without a "
                "sandbox. Rows with prompt, test and entry_point are run in one: eval.run_code=true"
            )
        return loaded

    def _found(self, name: str) -> list[Any]:
        if _is_file(name):
            if not Path(name).is_file():
                raise InputError(f"eval.tasks={name}: there is no such file")
            return [load_yaml(str(Path(name).absolute()), resolve_func=True)]
        found = self.match_tasks([name])
        if not found:
            near = difflib.get_close_matches(name, self.all_tasks, n=3)
            hint = f". Near it: {', '.join(near)}" if near else ""
            raise InputError(f"eval.tasks={name}: lm-eval has no such task, and it is no YAML file{hint}")
        return found


def _is_file(name: str) -> bool:
    return name.endswith((".yaml", ".yml"))


def evaluate_tasks(
    model: HarnessModel,
    tasks: Tasks,
    chat: bool = False,
    num_fewshot: Optional[int] = None,
    limit: Optional[int] = None,
) -> TaskEvaluation:
    """Returns what the model makes of the tasks.

    chat: questions are turns of the model's chat template. num_fewshot: examples before each question, None
    for what a task says. limit: of each task's questions, the first.
    """
    began = time.perf_counter()
    made = simple_evaluate(
        model,
        tasks=list(tasks.loaded["tasks"]),
        task_manager=tasks,
        num_fewshot=num_fewshot,
        limit=limit,
        apply_chat_template=chat,
        log_samples=False,
        torch_random_seed=None,
    )
    if model.num_cut:
        log.warning(
            "%d contexts are longer than the model's positions: their last tokens were taken", model.num_cut
        )
    names = {**made["results"], **made.get("groups", {})}
    figures = {
        name: {metric: value for metric, value in metrics.items() if metric not in ("alias", "name")}
        for name, metrics in names.items()
    }
    return TaskEvaluation(figures, model.scorer.forwarded, model.scorer.alone, time.perf_counter() - began)
