"""`mlxft eval`: loss and perplexity of a model on a file of rows, each with its standard error."""

import json
import logging
import math
import sys
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Iterable, Optional, Sequence

import numpy as np

from mlxft.backend import shape_multiple
from mlxft.config.schema import Config, DataConfig
from mlxft.data.example import Example
from mlxft.data.formats import find_form, find_format
from mlxft.data.load import load_examples, load_pairs
from mlxft.data.report import DataReport
from mlxft.data.sources import first_row
from mlxft.errors import EXIT_DONE, GuardStop
from mlxft.evaluation import text_windows
from mlxft.evaluation.adapted import load_adapted
from mlxft.evaluation.preference import PreferenceEvaluation, evaluate_pairs
from mlxft.layouts.arrange import Arranger
from mlxft.layouts.cache import TrainingCache
from mlxft.models.decoder import DecoderView, view
from mlxft.models.load import load_tokenizer, vocabulary_size
from mlxft.models.resolve import resolve
from mlxft.segmented.gradients import hidden_states, trained_head
from mlxft.training.layout_choice import choose_layout
from mlxft.training.objectives.common import HeadPlan, target_logps
from mlxft.training.objectives.preference import LossSettings, Orpo
from mlxft.training.objectives.sft import Sft
from mlxft.training.validation import fixed_batches

log = logging.getLogger("mlxft")

_HIGHEST_LOSS = 600.0  # of what exp and its standard error have numbers for


@dataclass(frozen=True)
class Evaluation:
    """What a model makes of rows.

    loss: mean of -log p over the supervised tokens, in nats. perplexity: exp(loss). *_stderr: the
    standard errors, from the spread of the tokens' losses as if they were independent; None for one
    token. rows: rows of the batches. seconds: the forwards alone.
    """

    loss: float
    loss_stderr: Optional[float]
    perplexity: float
    perplexity_stderr: Optional[float]
    tokens: int
    rows: int
    seconds: float

    def as_dict(self) -> dict[str, Any]:
        """Returns every figure by name."""
        return asdict(self)

    def lines(self) -> list[tuple[str, str]]:
        """Returns (name, value) as text, for people."""
        return [
            ("loss", f"{self.loss:.4f}{_plus_minus(self.loss_stderr, 4)} nats a token"),
            ("perplexity", f"{self.perplexity:,.2f}{_plus_minus(self.perplexity_stderr, 2)}"),
            ("tokens", f"{self.tokens:,} supervised"),
            ("seconds", f"{self.seconds:.1f} ({self.tokens / self.seconds:,.0f} tokens/s)"),
        ]


def evaluate(decoder: DecoderView, batches: Iterable[Sequence[Example]], objective: Sft) -> Evaluation:
    """Returns what the model makes of batches of rows; logits exist for one chunk of the head at a time.

    objective: how the rows are forwarded.

    Raises: GuardStop where the loss is not finite.
    """
    began = time.perf_counter()
    losses, rows = [], 0
    with decoder.active():
        for batch in batches:
            rows += len(batch)
            losses.append(token_losses(decoder, batch, objective))
    return _summed_up(np.concatenate(losses), rows, time.perf_counter() - began)


def token_losses(decoder: DecoderView, batch: Sequence[Example], objective: Sft) -> np.ndarray:
    """Returns -log p (M,) float64 of the batch's supervised tokens, row by row."""
    counts = objective.counts(batch)
    prepared = objective.prepare(batch, counts)
    hidden = hidden_states(decoder, prepared.inputs["tokens"], TrainingCache(prepared.layout))
    logps = target_logps(objective.head, trained_head(decoder), hidden, prepared.inputs)
    return -np.array(logps, dtype=np.float64)[: int(counts["tokens"])]  # without what rounds up


def _summed_up(losses: np.ndarray, rows: int, seconds: float) -> Evaluation:
    loss = float(losses.mean())
    if not math.isfinite(loss):
        raise GuardStop(
            f"the loss is not finite: {np.sum(~np.isfinite(losses)):,} of {len(losses):,} tokens have "
            "none. The weights may hold inf or nan, or model.dtype be too narrow for them"
        )
    loss_stderr = float(losses.std(ddof=1) / math.sqrt(len(losses))) if len(losses) > 1 else None
    perplexity = math.exp(min(loss, _HIGHEST_LOSS))
    perplexity_stderr = None if loss_stderr is None else perplexity * loss_stderr
    return Evaluation(loss, loss_stderr, perplexity, perplexity_stderr, len(losses), rows, seconds)


@dataclass(frozen=True)
class Report:
    """An evaluation and what it is of.

    rows: of the file. windows: rows of the forwards, more of them where long texts were cut.
    """

    evaluation: Evaluation | PreferenceEvaluation
    rows: int
    windows: int
    model: str
    adapter: Optional[str]
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
            lines.append(("adapter", self.adapter))
        lines.append(("data", f"{data}: {self.rows:,} row{'s' * (self.rows != 1)}{windows}"))
        return lines + self.evaluation.lines()


def _plus_minus(error: Optional[float], digits: int) -> str:
    return "" if error is None else f" ± {error:,.{digits}f}"


def main(overrides: list[str]) -> int:
    """Prints the evaluation that `overrides` describe and returns the exit code; `--json`: as one object.

    Raises: InputError for a wrong configuration, row, model or adapter; GuardStop as `evaluate` does.
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


def evaluate_config(config: Config) -> Report:
    """Returns the evaluation that a configuration describes: of `data.valid`, or of `data.train` without one.

    Rows of text are scored by their loss, pairs of answers by which is likelier.

    Raises: InputError and GuardStop as `main` does.
    """
    source = config.data.train if config.data.valid is None else config.data.valid
    folder = resolve(config.model.path, config.model.revision)
    head, adapter = HeadPlan(config.head.kind, config.head.chunk), config.adapter.init_from
    # Rows come first: what is wrong with them is said before a large model is read.
    form = find_form(first_row(source, config.data.columns), config.data.format)
    if form.kind == "pairs":
        tokenizer = load_tokenizer(folder, required=form.format != "tokens")
        pairs, report = load_pairs(source, config.data, tokenizer, vocabulary_size(folder))
        _warn(report)
        made = view(load_adapted(config, folder))
        layout = choose_layout("orpo", pairs, made.layouts)
        objective = Orpo(head, Arranger(layout, shape_multiple()), LossSettings(beta=1.0))
        batches = _with_progress(fixed_batches(pairs, config.data.batch_size))
        evaluation = evaluate_pairs(made, objective, batches)
        return Report(evaluation, len(pairs), len(pairs), config.model.path, adapter, source)
    examples, num_rows = _load_rows(source, config.data, folder)
    made = view(load_adapted(config, folder))
    objective = Sft(head, Arranger("padded", shape_multiple()))
    evaluation = evaluate(made, _with_progress(fixed_batches(examples, config.data.batch_size)), objective)
    return Report(evaluation, num_rows, len(examples), config.model.path, adapter, source)


def _warn(report: DataReport) -> None:
    for line in report.lines()[2:]:  # after the sizes: what was cut or dropped
        log.warning("%s", line)


def _load_rows(source: Any, cfg: DataConfig, folder: Path) -> tuple[list[Example], int]:
    """Returns the rows to forward, long texts cut into windows, and how many rows of the file they are."""
    tokenizer = load_tokenizer(folder, required=cfg.format != "tokens")
    is_text = find_format(first_row(source, cfg.columns), cfg.format) == "text"
    loaded = replace(cfg, max_length=sys.maxsize) if is_text else cfg
    examples, report = load_examples(source, loaded, tokenizer, vocabulary_size(folder))
    _warn(report)
    if not is_text:
        return examples, len(examples)
    bos_id = tokenizer.bos_token_id
    windows = [window for example in examples for window in text_windows.cut(example, cfg.max_length, bos_id)]
    return windows, len(examples)


def _with_progress(batches: Sequence[Sequence[Example]]) -> Iterable[Sequence[Example]]:
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
