"""`mlxft eval`: what a model makes of rows, scored as their kind asks for, or of lm-eval's tasks."""

import json
import logging
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Optional, Protocol

from mlxft.backend import shape_multiple
from mlxft.config.schema import Config, EvalConfig
from mlxft.data.formats import Form, find_form
from mlxft.data.load import load_examples, load_pairs, load_unpaired
from mlxft.data.questions import load_questions
from mlxft.data.report import DataReport
from mlxft.data.sources import first_row
from mlxft.errors import EXIT_DONE, InputError
from mlxft.evaluation import divergence, questions, sandbox, text_windows
from mlxft.evaluation.adapted import base_of, load_adapted
from mlxft.evaluation.continuations import Scorer
from mlxft.evaluation.perplexity import evaluate
from mlxft.evaluation.preference import evaluate_pairs
from mlxft.evaluation.unpaired import answer_logps, compare
from mlxft.layouts.arrange import Arranger
from mlxft.models.decoder import DecoderView, view
from mlxft.models.load import load_model, load_tokenizer, num_positions, vocabulary_size
from mlxft.models.new_tokens import Vocabulary, load_vocabulary
from mlxft.models.resolve import resolve
from mlxft.progress import followed
from mlxft.training.layout_choice import choose_layout
from mlxft.training.objectives.common import HeadPlan, Reference, Row
from mlxft.training.objectives.preference import LossSettings, Orpo
from mlxft.training.objectives.sft import Sft
from mlxft.training.objectives.unpaired import Kto, KtoSettings
from mlxft.training.reference import another_model
from mlxft.training.validation import fixed_batches

log = logging.getLogger("mlxft")


class Figures(Protocol):
    """What an evaluation finds."""

    def as_dict(self) -> dict[str, Any]:
        """Returns every figure by name."""

    def lines(self) -> list[tuple[str, str]]:
        """Returns (name, value) as text, for people."""


@dataclass(frozen=True)
class Evaluated:
    """Figures of a model, those of a reference beside it, and how the two differ, where they were asked for.

    rows: of the file. windows: rows of the forwards, more of them where long texts were cut.
    """

    evaluation: Figures
    rows: int = 0
    windows: int = 0
    reference: Optional[Figures] = None
    difference: Optional[Figures] = None


@dataclass(frozen=True)
class Report:
    """An evaluation and what it is of. reference: the model that is beside it. data: rows, or tasks."""

    found: Evaluated
    model: str
    adapter: Optional[str | list[str]]
    data: Any
    reference: Optional[str] = None

    @property
    def evaluation(self) -> Figures:
        """The model's own figures."""
        return self.found.evaluation

    def as_dict(self) -> dict[str, Any]:
        """Returns everything flat, as `--json` prints it; what a reference has under its name."""
        numbers = self.evaluation.as_dict()
        if self.found.difference is not None:
            numbers |= self.found.difference.as_dict()
        if self.found.rows:
            numbers |= {"rows": self.found.rows, "windows": self.found.windows}
        numbers |= {"model": self.model, "adapter": self.adapter, "data": self.data}
        if self.reference is not None:
            beside = self.found.reference.as_dict() if self.found.reference is not None else {}
            numbers["reference"] = beside | {"model": self.reference}
        return numbers

    def lines(self) -> list[tuple[str, ...]]:
        """Returns (name, value) as text, for people; with a reference (name, its value, the model's)."""
        about, own = self._about(), self.evaluation.lines()
        if self.found.reference is None:
            compared = [("reference", self.reference)] if self.reference is not None else []
            return about + compared + own
        others = dict(self.found.reference.lines())
        both = [(name, others.get(name, ""), value) for name, value in own if name != "seconds"]
        change = self.found.difference.lines() if self.found.difference else []
        head = ("", self.reference or "", "adapter" if self.adapter else self.model)
        return [head, *both, *((name, "", value) for name, value in change + about)]

    def _about(self) -> list[tuple[str, str]]:
        lines = [("model", self.model)]
        if self.adapter is not None:
            adapters = [self.adapter] if isinstance(self.adapter, str) else self.adapter
            lines.append(("adapter", ", ".join(adapters)))
        data = self.data if isinstance(self.data, str) else ", ".join(map(str, self.data))
        if not self.found.rows:
            return [*lines, ("tasks", data)]
        rows, windows = self.found.rows, self.found.windows
        cut = f", cut into {windows:,} windows" if windows > rows else ""
        return [*lines, ("data", f"{data}: {rows:,} row{'s' * (rows != 1)}{cut}")]


def main(overrides: list[str]) -> int:
    """Prints the evaluation that `overrides` describe and returns the exit code; `--json`: as one object.

    Raises: InputError for a wrong configuration, row, model or adapter; GuardStop
    for figures that are not finite.
    """
    from mlxft.config import compose

    composed = compose([text for text in overrides if text != "--json"], command="eval")
    report = evaluate_config(composed.config, composed.own.eval)
    if "--json" in overrides:
        print(json.dumps(report.as_dict(), ensure_ascii=False, default=str))
    elif sys.stdout and sys.stdout.isatty():
        _print_table(report.lines())
    else:
        print("\n".join(_as_line(*line) for line in report.lines()))
    return EXIT_DONE


def _as_line(name: str, *values: str) -> str:
    given = [value for value in values if value]
    return f"{name}: {' -> '.join(given)}" if name else " -> ".join(given)


@dataclass(frozen=True)
class _Task:
    """What is to be evaluated: a configuration, what only eval has of it, the model's folder."""

    config: Config
    wanted: EvalConfig
    folder: Path
    source: Any = None
    form: Optional[Form] = None

    @property
    def head(self) -> HeadPlan:
        return HeadPlan(self.config.head.kind, self.config.head.chunk)

    @cached_property
    def vocabulary(self) -> Vocabulary:
        needed = self.form is None or self.form.format != "tokens"
        return load_vocabulary(self.config, self.folder, required=needed)

    @property
    def tokenizer(self) -> Any:
        return self.vocabulary.tokenizer

    def load(self, load: Any, **changes: Any) -> list[Row]:
        """Returns the rows as one of data.load's functions reads them; warns of what was cut or dropped."""
        cfg = replace(self.config.data, **changes)
        rows, report = load(self.source, cfg, self.vocabulary.tokenizer, self.vocabulary.size)
        _warn(report)
        number = len(rows) if self.wanted.limit is None else min(self.wanted.limit, len(rows))
        return [rows[place] for place in range(number)]

    def batches(self, rows: Sequence[Row]) -> list[list[Row]]:
        return fixed_batches(rows, self.config.data.batch_size)

    def model(self) -> DecoderView:
        return view(load_adapted(self.config, self.folder, self.vocabulary.new))

    def reference(self, made: DecoderView) -> Optional[Reference]:
        """Returns what `eval.reference` names, loaded. Raises: InputError if its tokens are others."""
        named = self.wanted.reference
        if named is None:
            return None
        if named == "base":
            return base_of(made, self.config, self.folder)
        folder = resolve(named, key="eval.reference")
        if vocabulary_size(folder) != vocabulary_size(self.folder) or not self._reads_alike(folder):
            raise InputError(
                f"eval.reference={named}: its tokens are not those of {self.config.model.path}, so nothing "
                "can be compared token by token. Choose a model with the same tokenizer"
            )
        return another_model(view(load_model(folder, self.config.model.dtype, self.vocabulary.new)))

    def _reads_alike(self, folder: Path) -> bool:
        own, other = load_tokenizer(self.folder, required=False), load_tokenizer(folder, required=False)
        return own is None or other is None or own.get_vocab() == other.get_vocab()


def evaluate_config(config: Config, wanted: Optional[EvalConfig] = None) -> Report:
    """Returns the evaluation that a configuration describes: of `data.valid`, or of `data.train` without one.

    Rows to learn are scored by their loss, pairs of answers by which is likelier, labelled answers by
    which way an adapter has moved them, questions by their answers; `eval.tasks` are lm-eval's.

    Raises: InputError and GuardStop as `main` does.
    """
    wanted = wanted or EvalConfig()
    folder = resolve(config.model.path, config.model.revision)
    if wanted.tasks is not None:
        found, source = _evaluate_tasks(_Task(config, wanted, folder)), wanted.tasks
    else:
        source = config.data.train if config.data.valid is None else config.data.valid
        form = find_form(first_row(source, config.data), config.data.format)
        _refuse_unused(wanted, form)
        # Each loads its rows first: what is wrong with them is said before a large model is read.
        found = _HOW[form.kind](_Task(config, wanted, folder, source, form))
    return Report(found, config.model.path, config.adapter.init_from, source, wanted.reference)


# The keys of `eval` that rows of a form, or of a kind, make use of beside reference and limit.
_USES = {
    "text": ("stride",),
    "choices": ("batch_tokens", "chat"),
    "answer": ("chat", "max_tokens", "extract"),
    "code": ("chat", "max_tokens", "run_code", "timeout"),
}


def _refuse_unused(wanted: EvalConfig, form: Form) -> None:
    """Raises InputError for a key of `eval` that was given and that rows of this form make no use of."""
    used = ("reference", "limit", *_USES.get(form.format, ()))
    for item in fields(EvalConfig):
        if item.name not in used and getattr(wanted, item.name) != item.default:
            users = [name for name, keys in _USES.items() if item.name in keys]
            raise InputError(
                f"eval.{item.name}: it is for rows of the format {' or '.join(users)}, and these have the "
                f"format {form.format}. Leave it out"
            )


def _evaluate_examples(task: _Task) -> Evaluated:
    if task.form.format == "text":
        texts = task.load(load_examples, max_length=sys.maxsize)
        length, bos_id = task.config.data.max_length, task.tokenizer.bos_token_id
        stride = task.wanted.stride
        examples = [window for text in texts for window in text_windows.cut(text, length, bos_id, stride)]
    else:
        texts = examples = task.load(load_examples)
    made = task.model()
    objective = Sft(task.head, Arranger("padded", shape_multiple()))
    batches, reference = task.batches(examples), task.reference(made)
    if reference is None:
        return Evaluated(evaluate(made, _followed(batches), objective), len(texts), len(examples))
    own, other, apart = divergence.compare(made, reference, _followed(batches), objective)
    return Evaluated(own, len(texts), len(examples), other, apart)


def _evaluate_pairs(task: _Task) -> Evaluated:
    pairs = task.load(load_pairs)
    made = task.model()
    layout = choose_layout("orpo", pairs, made.layouts)
    objective = Orpo(task.head, Arranger(layout, shape_multiple()), LossSettings(beta=1.0))
    batches, reference = task.batches(pairs), task.reference(made)
    both = _both(made, reference, lambda view: evaluate_pairs(view, objective, _followed(batches)))
    return Evaluated(both[0], len(pairs), len(pairs), both[1])


def _both(
    made: DecoderView, reference: Optional[Reference], evaluate: Callable[[DecoderView], Any]
) -> tuple[Any, Optional[Any]]:
    """Returns what `evaluate` finds of the model, and of its reference where there is one."""
    own = evaluate(made)
    if reference is None:
        return own, None
    with reference(made) as other:
        return own, evaluate(other)


def _evaluate_unpaired(task: _Task) -> Evaluated:
    batches = task.batches(task.load(load_unpaired))
    rows = [row for batch in batches for row in batch]
    made = task.model()
    objective = Kto(task.head, Arranger("padded", shape_multiple()), KtoSettings())
    began, base_logps = time.perf_counter(), None
    reference = task.reference(made)
    if reference is None and task.config.adapter.init_from is not None:
        reference = base_of(made, task.config, task.folder)
    logps = answer_logps(made, objective, _followed(batches))
    if reference is not None:
        with reference(made) as base:
            base_logps = answer_logps(base, objective, _followed(batches))
    evaluation = compare(logps, base_logps, rows, time.perf_counter() - began)
    return Evaluated(evaluation, len(rows), len(rows))


def _evaluate_questions(task: _Task) -> Evaluated:
    wanted, form = task.wanted, task.form.format
    asked = load_questions(task.source, task.config.data, task.form, wanted.limit)
    if form == "code":
        _allow_programs(wanted)
    has_template = bool(getattr(task.tokenizer, "has_chat_template", False))
    chat = has_template if wanted.chat is None else wanted.chat
    if chat and not has_template:
        raise InputError("eval.chat: the model's tokenizer has no chat template; leave it out")
    write = questions.Writing(task.tokenizer, wanted.max_tokens, task.config.data.batch_size, chat)

    def evaluate(view: DecoderView) -> questions.QuestionEvaluation:
        if form == "choices":
            scorer = Scorer(view, task.head, wanted.batch_tokens)
            return questions.evaluate_choices(scorer, task.tokenizer, asked, chat)
        if form == "answer":
            return questions.evaluate_written(write, view.model, asked, wanted.extract)
        return questions.evaluate_code(write, view.model, asked, wanted.timeout)

    made = task.model()
    own, other = _both(made, task.reference(made), evaluate)
    apart = None if other is None else questions.change(own, other)
    return Evaluated(own, len(asked), len(asked), other, apart)


def _allow_programs(wanted: EvalConfig) -> None:
    """Raises InputError unless it was said that what the model writes may be run."""
    if not wanted.run_code:
        raise InputError(
            "eval.run_code: these rows are checked by running the program that the model writes, and that is "
            "off unless you say eval.run_code=true. It runs in a process of its own with limits, as your user"
        )
    if not sandbox.cuts_network():
        log.warning("eval.run_code: programs are run with limits, but here they can reach the network")


def _evaluate_tasks(task: _Task) -> Evaluated:
    try:
        from mlxft.evaluation import harness
    except ModuleNotFoundError as error:
        raise InputError(
            f"eval.tasks: lm-eval is not installed ({error.name} is missing): pip install -e '.[lm-eval]' "
            "in mlxft's checkout"
        ) from None
    wanted = task.wanted
    tasks = harness.Tasks(wanted.tasks)
    if wanted.chat and not getattr(task.tokenizer, "has_chat_template", False):
        raise InputError("eval.chat: the model's tokenizer has no chat template; leave it out")

    def evaluate(view: DecoderView) -> harness.TaskEvaluation:
        scorer = Scorer(view, task.head, wanted.batch_tokens)
        length, batch_size = num_positions(task.folder), task.config.data.batch_size
        model = harness.HarnessModel(scorer, task.tokenizer, length, batch_size)
        return harness.evaluate_tasks(model, tasks, bool(wanted.chat), wanted.num_fewshot, wanted.limit)

    made = task.model()
    own, other = _both(made, task.reference(made), evaluate)
    return Evaluated(own, reference=other)


_HOW: dict[str, Callable[[_Task], Evaluated]] = {
    "examples": _evaluate_examples,
    "pairs": _evaluate_pairs,
    "unpaired": _evaluate_unpaired,
    "questions": _evaluate_questions,
}


def _warn(report: DataReport) -> None:
    for line in report.lines()[2:]:  # after the sizes: what was cut or dropped
        log.warning("%s", line)


def _followed(batches: Sequence[Any]) -> Iterable[Any]:
    return followed(batches, "evaluating")


def _print_table(lines: Sequence[tuple[str, ...]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(show_header=False)
    for line in lines:
        table.add_row(*line)
    Console().print(table)
