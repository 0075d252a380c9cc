"""`mlxft eval`: what a model makes of a file of rows, scored as their kind asks for."""

import json
import logging
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Optional

from mlxft.backend import shape_multiple
from mlxft.config.schema import Config
from mlxft.data.formats import Form, find_form
from mlxft.data.load import load_examples, load_pairs, load_unpaired
from mlxft.data.report import DataReport
from mlxft.data.sources import first_row
from mlxft.errors import EXIT_DONE
from mlxft.evaluation import text_windows
from mlxft.evaluation.adapted import load_adapted, without_adapter
from mlxft.evaluation.perplexity import Evaluation, evaluate
from mlxft.evaluation.preference import PreferenceEvaluation, evaluate_pairs
from mlxft.evaluation.unpaired import UnpairedEvaluation, answer_logps, compare
from mlxft.layouts.arrange import Arranger
from mlxft.models.decoder import DecoderView, view
from mlxft.models.new_tokens import Vocabulary, load_vocabulary
from mlxft.models.resolve import resolve
from mlxft.training.layout_choice import choose_layout
from mlxft.training.objectives.common import HeadPlan, Row
from mlxft.training.objectives.preference import LossSettings, Orpo
from mlxft.training.objectives.sft import Sft
from mlxft.training.objectives.unpaired import Kto, KtoSettings
from mlxft.training.validation import fixed_batches

log = logging.getLogger("mlxft")


@dataclass(frozen=True)
class Report:
    """An evaluation and what it is of.

    rows: of the file. windows: rows of the forwards, more of them where long texts were cut.
    """

    evaluation: Evaluation | PreferenceEvaluation | UnpairedEvaluation
    rows: int
    windows: int
    model: str
    adapter: Optional[str | list[str]]
    data: Any

    def as_dict(self) -> dict[str, Any]:
        """Returns everything flat, as `--json` prints it."""
        numbers = self.evaluation.as_dict() | {"rows": self.rows, "windows": self.windows}
        return numbers | {"model": self.model, "adapter": self.adapter, "data": self.data}

    def lines(self) -> list[tuple[str, str]]:
        """Returns (name, value) as text, for people."""
        windows = f", cut into {self.windows:,} windows" if self.windows > self.rows else ""
        data = self.data if isinstance(self.data, str) else ", ".join(self.data)
        lines = [("model", self.model)]
        if self.adapter is not None:
            adapters = [self.adapter] if isinstance(self.adapter, str) else self.adapter
            lines.append(("adapter", ", ".join(adapters)))
        lines.append(("data", f"{data}: {self.rows:,} row{'s' * (self.rows != 1)}{windows}"))
        return lines + self.evaluation.lines()


def main(overrides: list[str]) -> int:
    """Prints the evaluation that `overrides` describe and returns the exit code; `--json`: as one object.

    Raises: InputError for a wrong configuration, row, model or adapter; GuardStop
    for figures that are not finite.
    """
    from mlxft.config import compose

    report = evaluate_config(compose([text for text in overrides if text != "--json"], command="eval").config)
    if "--json" in overrides:
        print(json.dumps(report.as_dict(), ensure_ascii=False))
    elif sys.stdout and sys.stdout.isatty():
        _print_table(report.lines())
    else:
        print("\n".join(f"{name}: {value}" for name, value in report.lines()))
    return EXIT_DONE


@dataclass(frozen=True)
class _Task:
    """What is to be evaluated: a configuration, its rows' files, their form, the model's folder."""

    config: Config
    source: Any
    form: Form
    folder: Path

    @property
    def head(self) -> HeadPlan:
        return HeadPlan(self.config.head.kind, self.config.head.chunk)

    @cached_property
    def vocabulary(self) -> Vocabulary:
        return load_vocabulary(self.config, self.folder, required=self.form.format != "tokens")

    def load_model(self) -> DecoderView:
        """Returns the model, with its adapter where one is given."""
        return view(load_adapted(self.config, self.folder, self.vocabulary.new))

    def load(self, load: Any, **changes: Any) -> list[Row]:
        """Returns the rows as one of data.load's functions reads them; warns of what was cut or dropped."""
        cfg = replace(self.config.data, **changes)
        rows, report = load(self.source, cfg, self.vocabulary.tokenizer, self.vocabulary.size)
        _warn(report)
        return rows

    def batches(self, rows: Sequence[Row]) -> list[list[Row]]:
        return fixed_batches(rows, self.config.data.batch_size)


def evaluate_config(config: Config) -> Report:
    """Returns the evaluation that a configuration describes: of `data.valid`, or of `data.train` without one.

    Rows to learn are scored by their loss, pairs of answers by which is likelier, labelled answers by
    which way an adapter has moved them.

    Raises: InputError and GuardStop as `main` does.
    """
    source = config.data.train if config.data.valid is None else config.data.valid
    form = find_form(first_row(source, config.data), config.data.format)
    task = _Task(config, source, form, resolve(config.model.path, config.model.revision))
    how = {"examples": _evaluate_examples, "pairs": _evaluate_pairs, "unpaired": _evaluate_unpaired}
    # Each loads its rows first: what is wrong with them is said before a large model is read.
    evaluation, num_rows, num_windows = how[form.kind](task)
    return Report(evaluation, num_rows, num_windows, config.model.path, config.adapter.init_from, source)


def _evaluate_examples(task: _Task) -> tuple[Evaluation, int, int]:
    if task.form.format == "text":
        texts = task.load(load_examples, max_length=sys.maxsize)
        length, bos_id = task.config.data.max_length, task.vocabulary.tokenizer.bos_token_id
        examples = [window for text in texts for window in text_windows.cut(text, length, bos_id)]
    else:
        texts = examples = task.load(load_examples)
    made = task.load_model()
    objective = Sft(task.head, Arranger("padded", shape_multiple()))
    evaluation = evaluate(made, _with_progress(task.batches(examples)), objective)
    return evaluation, len(texts), len(examples)


def _evaluate_pairs(task: _Task) -> tuple[PreferenceEvaluation, int, int]:
    pairs = task.load(load_pairs)
    made = task.load_model()
    layout = choose_layout("orpo", pairs, made.layouts)
    objective = Orpo(task.head, Arranger(layout, shape_multiple()), LossSettings(beta=1.0))
    return evaluate_pairs(made, objective, _with_progress(task.batches(pairs))), len(pairs), len(pairs)


def _evaluate_unpaired(task: _Task) -> tuple[UnpairedEvaluation, int, int]:
    batches = task.batches(task.load(load_unpaired))
    rows = [row for batch in batches for row in batch]
    made = task.load_model()
    objective = Kto(task.head, Arranger("padded", shape_multiple()), KtoSettings())
    began, base_logps = time.perf_counter(), None
    logps = answer_logps(made, objective, _with_progress(batches))
    if task.config.adapter.init_from is not None:
        with without_adapter(made, task.config, task.folder) as base:
            base_logps = answer_logps(base, objective, _with_progress(batches))
    evaluation = compare(logps, base_logps, rows, time.perf_counter() - began)
    return evaluation, len(rows), len(rows)


def _warn(report: DataReport) -> None:
    for line in report.lines()[2:]:  # after the sizes: what was cut or dropped
        log.warning("%s", line)


def _with_progress(batches: Sequence[Sequence[Row]]) -> Iterable[Sequence[Row]]:
    """Returns the batches; on a terminal, a bar on stderr follows them."""
    from rich.console import Console
    from rich.progress import track

    console = Console(stderr=True)
    if not console.is_terminal:
        return batches
    return track(batches, "evaluating", console=console, transient=True)


def _print_table(lines: Sequence[tuple[str, str]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(show_header=False)
    for name, value in lines:
        table.add_row(name, value)
    Console().print(table)
