"""`mlxft plan`: what a run will take in memory and time, from headers and the rows' lengths."""

import io
import json
import shutil
import sys
from dataclasses import asdict, dataclass
from typing import Any, Optional

from rich.console import Console
from rich.table import Table
from rich.text import Text

from mlxft.backend import shape_multiple
from mlxft.config.choices import LOSS_KEYS
from mlxft.config.composition import Composed
from mlxft.config.schema import Config
from mlxft.errors import EXIT_DONE
from mlxft.layouts.arrange import Arranger
from mlxft.models.new_tokens import load_vocabulary
from mlxft.planning.choose import Choice, Planner
from mlxft.planning.local import local_folder
from mlxft.planning.predict import Prediction
from mlxft.planning.shape import ModelShape, shape_in
from mlxft.planning.workload import Workload, longest_batch, median_batch, workload
from mlxft.segmented.plan import GradientPlan
from mlxft.sizes import written
from mlxft.training import objectives
from mlxft.training.folder import continued
from mlxft.training.inputs import needs_tokenizer, windows_to_plan
from mlxft.training.layout_choice import choose_layout
from mlxft.training.reference_files import check_tokens

_MOST_POSITIONS = 2**20  # that a row is thought to have
_NARROWEST = 80


@dataclass(frozen=True)
class Line:
    """One way to run the backward: at the longest batch and the median one, and how long rows may be.

    fits_length: positions of a row. fits_max_length: the same as data.max_length counts.
    """

    longest: Prediction
    median: Prediction
    fits_length: int
    fits_max_length: int


@dataclass(frozen=True)
class Survey:
    """All that the command found out. lines: none for families whose layers cannot be probed."""

    config: Config
    shape: ModelShape
    planner: Planner
    layout: str
    longest: Workload
    median: Workload
    lines: list[Line]
    choice: Choice

    def as_dict(self) -> dict[str, Any]:
        """Returns everything as `--json` prints it: sizes in bytes, times in seconds."""
        shape = self.shape
        plans = [
            {
                **asdict(line.longest.plan),
                "peak_bytes": line.longest.peak_bytes,
                "seconds": line.longest.seconds,
                "layers_bytes": line.longest.layers_bytes,
                "working_bytes": line.longest.working_bytes,
                "head_bytes": line.longest.head_bytes,
                "median_peak_bytes": line.median.peak_bytes,
                "median_seconds": line.median.seconds,
                "fits": line.longest.peak_bytes <= self.planner.limit_bytes,
                "fits_length": line.fits_length,
                "fits_max_length": line.fits_max_length,
            }
            for line in self.lines
        ]
        return {
            "model": self.config.model.path,
            "parameters": shape.num_parameters,
            "trained_parameters": shape.num_trained,
            "weights_bytes": self._weights_bytes,
            "adapter_bytes": self._adapter_bytes,
            "gradients_bytes": shape.trained_bytes,
            "optimizer_bytes": shape.state_bytes,
            "layout": self.layout,
            "longest": asdict(self.longest),
            "median": asdict(self.median),
            "limit_bytes": self.planner.limit_bytes,
            "bound_bytes": self.planner.bound_bytes,
            "measured_in": self.planner.measured_in and str(self.planner.measured_in),
            "plans": plans,
            "taken": asdict(self.choice.plan),
            "taken_fits": self.choice.fits,
        }

    @property
    def _adapter_bytes(self) -> int:
        return self.shape.trained_bytes if self.config.adapter.kind == "lora" else 0

    @property
    def _weights_bytes(self) -> int:
        return self.shape.model_bytes - self._adapter_bytes

    def facts(self) -> list[tuple[str, str]]:
        """Returns (name, value) of what is the same whichever way the backward is run."""
        shape = self.shape
        facts = [
            ("model", self.config.model.path),
            ("parameters", f"{shape.num_parameters:,}, {shape.num_trained:,} of them trained"),
            ("weights", written(self._weights_bytes)),
            ("adapter", written(self._adapter_bytes)),
            ("gradients", written(shape.trained_bytes)),
            ("optimiser", f"{written(shape.state_bytes)} ({self.config.optimizer.name})"),
            ("layout", self.layout),
            ("longest batch", str(self.longest)),
            ("median batch", str(self.median)),
        ]
        by_plan = {line.longest.plan: line.longest for line in self.lines}
        segmented = by_plan.get(self._one_layer)
        if segmented is not None:
            facts += [
                ("what enters segments", f"{written(segmented.layers_bytes)} (of one layer each)"),
                ("one segment at work", written(segmented.working_bytes)),
                ("head", written(segmented.head_bytes)),
            ]
        facts.append(("memory limit", written(self.planner.limit_bytes)))
        if self.planner.measured_in is not None:
            facts.append(("figures of", f"{self.planner.measured_in} (delete it to measure again)"))
        return facts

    @property
    def _one_layer(self) -> Optional[GradientPlan]:
        plans = [line.longest.plan for line in self.lines if line.longest.plan.kind == "segmented"]
        return next((plan for plan in plans if plan.segment_layers == 1 and not plan.halves), None)

    def verdict(self) -> str:
        """Returns what training would take, and what helps where that does not fit."""
        asked = self.config.trainer.gradient
        if not self.choice.fits and not self.choice.is_bound:
            return f"trainer.gradient={asked} does not fit: {self.choice}. {self.choice.help}"
        return f"trainer.gradient={asked} takes: {self.choice}"


def main(overrides: list[str]) -> int:
    """Prints the plan of what `overrides` describe and returns the exit code; `--json`: as one object.

    Raises: InputError for a wrong configuration, row or model.
    """
    from mlxft.config import compose

    found = survey(compose([text for text in overrides if text != "--json"], command="plan"))
    if "--json" in overrides:
        print(json.dumps(found.as_dict(), ensure_ascii=False))
    else:
        _show(found)
    return EXIT_DONE


def survey(composed: Composed) -> Survey:
    """Returns the plan of a run; of the model only headers and the tokenizer are read.

    Raises: InputError as training would, before it reads the model.
    """
    config = composed.config
    continuation = continued(composed.run_name, asdict(config))
    folder = local_folder(config.model.path, config.model.revision)
    named = config.loss.reference
    reference = folder if named in ("base", "start") else local_folder(named, key="loss.reference")
    vocabulary = load_vocabulary(config, folder, required=needs_tokenizer(config))
    windows = windows_to_plan(config, vocabulary, continuation)
    if reference != folder:
        check_tokens(windows.rows, vocabulary, folder, reference)
    shape = shape_in(config, folder, vocabulary.new)
    layout = config.trainer.layout
    if layout == "auto":
        layout = choose_layout(config.trainer.objective, windows.rows, shape.view.layouts)
    asked = config.trainer.gradient
    shape.view.require(layout, "whole" if asked == "auto" else asked)
    if config.trainer.neftune_alpha:
        shape.view.require_noise()
    objective = objectives.build(config, Arranger(layout, shape_multiple()))
    longest, median = (workload(objective, batch(windows)) for batch in (longest_batch, median_batch))
    is_another = "reference" in LOSS_KEYS[config.trainer.objective] and reference != folder
    planner = Planner(config, folder, longest, shape, reference if is_another else None)
    plans = planner.all_plans() if shape.can_probe else []
    lines = [_line(planner, plan, longest, median) for plan in plans]
    choice = planner.choose(continuation and continuation.plan())
    return Survey(config, shape, planner, layout, longest, median, lines, choice)


def _line(planner: Planner, plan: GradientPlan, longest: Workload, median: Workload) -> Line:
    predict = planner.predictor
    fits = predict.longest(plan, longest, planner.limit_bytes, _MOST_POSITIONS)
    return Line(predict(plan, longest), predict(plan, median), fits, longest.max_length_of(fits))


def _show(found: Survey) -> None:
    """Prints by way of `print`: where nobody reads any more, rich ends a process in its own way."""
    page = io.StringIO()
    watched = sys.stdout is not None and sys.stdout.isatty()
    width = max(shutil.get_terminal_size().columns, _NARROWEST)
    console = Console(
        file=page, force_terminal=watched, width=width, highlight=False, markup=False, emoji=False
    )
    facts = Table.grid(padding=(0, 2))
    for name, value in found.facts():
        facts.add_row(name, Text(value, overflow="fold"))
    console.print(facts)
    if found.lines:
        console.print()
        console.print(_table(found))
    console.print()
    console.print(Text(found.verdict()), soft_wrap=True)
    print("\n".join(line.rstrip() for line in page.getvalue().splitlines()))


def _table(found: Survey) -> Table:
    """Returns a line for each way to run the backward; without lines or colours that it would need."""
    table = Table(box=None, padding=(0, 1), header_style="bold", pad_edge=False)
    table.add_column("backward")
    for name in ("peak", "s a step", "median", "s a step", "fits up to", ""):
        table.add_column(name, justify="left" if not name else "right")
    for line in found.lines:
        longest, median = line.longest, line.median
        taken = longest.plan == found.choice.plan and found.choice.fits
        fits = longest.peak_bytes <= found.planner.limit_bytes
        most = f"{line.fits_max_length:,}" + "+" * (line.fits_length >= _MOST_POSITIONS)
        table.add_row(
            _named(longest.plan),
            written(longest.peak_bytes),
            _seconds(longest.seconds),
            written(median.peak_bytes),
            _seconds(median.seconds),
            most,
            "taken" if taken else "" if fits else "no fit",
            style="bold" if taken else None,
        )
    return table


def _named(plan: GradientPlan) -> str:
    return "segmented, 1/2 layer" if plan.halves else str(plan).removesuffix(" a segment")


def _seconds(seconds: float) -> str:
    return f"{seconds:,.0f}" if seconds >= 10 else f"{seconds:.2g}"
