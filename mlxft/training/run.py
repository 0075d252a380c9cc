"""`mlxft train`: from a checked configuration to a run's folder with metrics, checkpoints and adapter."""

import logging
import shutil
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Optional

from mlxft.available_memory import memory_kept_to
from mlxft.backend import shape_multiple
from mlxft.config import to_yaml
from mlxft.config.choices import LOSS_KEYS
from mlxft.config.schema import Config
from mlxft.data.batches import PackedOrder
from mlxft.errors import MlxftError
from mlxft.layouts.arrange import Arranger
from mlxft.models import manifest
from mlxft.models.adapters import save_adapter
from mlxft.models.load import chat_template, num_positions
from mlxft.models.new_tokens import load_vocabulary
from mlxft.models.resolve import resolve
from mlxft.planning.choose import Choice, Planner, refuse, try_longest
from mlxft.planning.shape import shape_of
from mlxft.planning.workload import longest_batch, workload
from mlxft.segmented.build import AnyGradient, build
from mlxft.sizes import written
from mlxft.training import environment, objectives, optimizer, resume
from mlxft.training.best import BestAdapter
from mlxft.training.checkpoint import CheckpointStore
from mlxft.training.disk import as_json, disk_guard, write_whole
from mlxft.training.folder import Start, open_run
from mlxft.training.hold import CONFIG
from mlxft.training.inputs import (
    check_steps,
    in_windows,
    load_rows,
    load_trained,
    needs_tokenizer,
    warn_of_positions,
    warn_of_unseen,
)
from mlxft.training.layout_choice import choose_layout
from mlxft.training.loop import Loop, Progress
from mlxft.training.memory import MemoryLog, StepMemory, memory_guard
from mlxft.training.metrics import MetricsFile
from mlxft.training.objectives.common import Row
from mlxft.training.reference import make as make_reference
from mlxft.training.reference import with_references
from mlxft.training.reference_files import (
    check_tokens,
    digests_of_files,
    digests_of_tokens,
    model_folder,
)
from mlxft.training.samples import answer_all, read_samples, show_samples
from mlxft.training.screen import lasting_output, open_screen
from mlxft.training.signals import stop_on_signals
from mlxft.training.step import Stepper
from mlxft.training.trackers import Tracked, check, tracked
from mlxft.training.validation import fixed_batches, validate

log = logging.getLogger("mlxft")

_SAMPLES = "samples_before.json"


@dataclass(frozen=True)
class RunResult:
    """What a run left. status: "completed" or "early_stopped", or "dry_run", which leaves nothing."""

    run_dir: Path
    adapter: Path
    status: str
    steps: int
    loss: Optional[float]
    best_loss: Optional[float]


def train(composed) -> RunResult:
    """Trains as the composed configuration says and returns what came out.

    Raises: InputError for wrong input, GuardStop and Interrupted as the loop does.
    """
    config = composed.config
    with lasting_output(), open_run(composed.run_name, asdict(config)) as start, _end_in_log():
        run = _Run(config, start)
        if config.trainer.dry_run:
            return run.dry_run()
        status = run.train()
        return run.summarise(status)


@contextmanager
def _end_in_log():
    """Writes why a run ended into its log too; on the screen the command tells it."""
    try:
        yield
    except MlxftError as error:
        log.error("%s", error, extra={"file_only": True})
        raise
    except Exception:
        log.exception("a fault of mlxft", extra={"file_only": True})
        raise


class _Run:
    """A run whose inputs are loaded and, where it continues another, fit; its folder is as it was."""

    def __init__(self, config: Config, start: Start):
        self.config = config
        self.start = start
        self.run_dir = start.run_dir
        check(config.logger)
        folder = resolve(config.model.path, config.model.revision)
        reference_folder = model_folder(config, folder)  # one that is missing is told before anything is read
        self.weights = digests_of_files(config, folder, reference_folder)
        if start.continuation:
            start.continuation.check_weights(self.weights)
        self.vocabulary = load_vocabulary(config, folder, required=needs_tokenizer(config))
        self.weights |= digests_of_tokens(self.vocabulary.new)
        self.rows = load_rows(config, self.vocabulary)
        warn_of_unseen(self.vocabulary.new, self.rows)
        warn_of_positions((self.rows.train, self.rows.valid), num_positions(folder))
        if reference_folder != folder:
            for rows in (self.rows.train, self.rows.valid):
                check_tokens(rows, self.vocabulary, folder, reference_folder)
        if start.continuation:
            start.continuation.check_rows(self.rows.digests())
        self.windows = in_windows(config, self.rows)
        self.total_steps = self.windows.total_steps(config.trainer.max_steps, config.trainer.epochs)
        check_steps(config, self.total_steps, start.continuation)
        if start.continuation:
            self.windows.begin(start.continuation.checkpoint.state)
        self.view, self.report = load_trained(config, folder, self.vocabulary.new)
        if start.continuation:
            start.continuation.check_adapter(self.report)
        template = chat_template(self.vocabulary.tokenizer)
        digests = self.rows.digests()
        self.manifest = manifest.describe(config.model, folder, digests, to_yaml(config), template)
        self._make_objective(reference_folder)
        self.choice = self._choose_plan(folder, reference_folder)
        self.memory = StepMemory()

    def train(self) -> str:
        """Trains to the end, writes the adapter, and returns how it ended."""
        with ExitStack() as files:
            files.enter_context(memory_kept_to(self.choice.limit_bytes))
            stepper = self._stepper(files)
            self.progress = Progress()
            if self.start.continuation:
                self.progress = self.start.continuation.restore(self.view.model, stepper.optimizer)
            if self.choice.is_near:
                self._try_longest(stepper)
            self.before = self._samples_before()
            self._write_identity()
            metrics = files.enter_context(self._metrics())
            with stop_on_signals() as stop, open_screen(self.start.step, self.total_steps) as screen:
                stepper.should_stop = stop
                status = self._loop(stepper, metrics, screen, stop).run()
        with disk_guard(self.run_dir / "adapter"):
            self._write_adapter(self.run_dir / "adapter")
        return status

    def dry_run(self) -> RunResult:
        """Takes one optimiser step on the longest batch and says what it took; nothing is left of it."""
        batch = longest_batch(self.windows)
        with ExitStack() as files:
            files.enter_context(memory_kept_to(self.choice.limit_bytes))
            stepper = self._stepper(files)
            self.memory.begin(1)
            began = time.perf_counter()
            with memory_guard("the longest batch", [batch]):
                window = stepper.take([batch], 0, self.config.optimizer.lr)
        seconds, peak = time.perf_counter() - began, self.memory.peak_bytes()
        log.info(
            "dry run: the longest batch (%s) took %.1f s, its kernels' compilation included, and a peak of "
            "%s; loss %.4f, gradient norm %.4f. Nothing was written",
            self.choice.wanted, seconds, written(peak), window.loss, window.grad_norm,
        )  # fmt: skip
        return RunResult(self.run_dir, self.run_dir / "adapter", "dry_run", 0, window.loss, None)

    def _make_objective(self, reference_folder: Path) -> None:
        """Sets the objective, and gives the rows what it needs to know of them before training."""
        config, objective = self.config, self.config.trainer.objective
        layout = config.trainer.layout
        if layout == "auto":
            layout = choose_layout(objective, self.rows.train, self.view.layouts)
        asked = config.trainer.gradient
        self.view.require(layout, "whole" if asked == "auto" else asked)
        if config.trainer.neftune_alpha:
            self.view.require_noise()
        reference = make_reference(config, self.view) if "reference" in LOSS_KEYS[objective] else None
        self.objective = objectives.build(config, Arranger(layout, shape_multiple()), reference)
        if reference is not None and config.loss.reference_scored == "once":
            batches = fixed_batches(self.rows.train, config.data.batch_size)
            num_seen = self.total_steps * config.trainer.accumulate * config.data.batch_size
            with memory_guard("scoring the reference", batches):
                train, valid = (
                    with_references(self.objective, self.view, rows, config, self.weights, seen)
                    if rows
                    else []
                    for rows, seen in ((self.rows.train, num_seen), (self.rows.valid, None))
                )
            self.rows = replace(self.rows, train=train, valid=valid)
            self.windows = replace(self.windows, rows=train)

    def _stepper(self, files: ExitStack) -> Stepper:
        trainer = self.config.trainer
        stepper = Stepper(
            self.objective,
            self._gradient(files),
            optimizer.build(self.config.optimizer),
            trainer.clip_norm,
            trainer.seed,
            self.config.adapter.dropout > 0,
            trainer.neftune_alpha,
            optimizer.grouping(self.config.optimizer),
        )
        stepper.optimizer.init(self.view.model.trainable_parameters())
        return stepper

    def _choose_plan(self, folder: Path, reference_folder: Path) -> Choice:
        """Returns how the backward is run. Raises: GuardStop if the longest batch cannot fit."""
        wanted = workload(self.objective, longest_batch(self.windows))
        shape = shape_of(self.view, self.report, self.config)
        another = reference_folder if reference_folder != folder else None
        planner = Planner(self.config, folder, wanted, shape, another)
        choice = planner.choose(self.start.continuation and self.start.continuation.plan())
        refuse(choice)
        return choice

    def _try_longest(self, stepper: Stepper) -> None:
        """Runs the longest batch once, for nothing: what cannot fit is told now, not hours later."""
        batch, gradient = longest_batch(self.windows), stepper.gradient
        observe, gradient.observe = gradient.observe, None

        def attempt() -> None:
            with memory_guard("the longest batch", [batch]):
                stepper.window([batch], 0)

        log.info("the longest batch (%s) is tried first", self.choice.wanted)
        try_longest(attempt, self.choice)
        gradient.observe = observe

    def _gradient(self, files: ExitStack) -> AnyGradient:
        trainer = self.config.trainer
        log.info("gradient: %s; layout: %s", self.choice, self.objective.arranger.layout)
        if trainer.log_memory:
            memory = MemoryLog(self.run_dir / "memory.jsonl", self.start.step)
            self.memory = files.enter_context(closing(memory))
        observer = self.memory if trainer.log_memory else None
        return build(self.view, self.objective, self.choice.plan, trainer.deterministic, observer)

    def _valid_batches(self) -> list[list[Row]]:
        """Validation rows in batches no larger than those of training."""
        data, rows = self.config.data, self.rows.valid
        if data.batch_tokens is None:
            return fixed_batches(rows, data.batch_size)
        order = PackedOrder([row.num_tokens for row in rows], data.batch_tokens, shuffle=False, seed=0)
        return [[rows[place] for place in batch] for batch in order.epoch(0)]

    def _loop(self, stepper: Stepper, metrics: Tracked, screen, stop) -> Loop:
        best = BestAdapter(self.run_dir, self._write_adapter)
        best.restore(self.progress.best_step, self.start.from_run)
        check = None
        if self.rows.valid:
            batches = self._valid_batches()

            def check() -> dict[str, Any]:
                with memory_guard("validation", batches):
                    return validate(self.view, self.objective, batches)

        identity = resume.identity(asdict(self.config), self.weights, self.rows.digests(), self.report)
        return Loop(
            config=self.config,
            stepper=stepper,
            windows=self.windows,
            total_steps=self.total_steps,
            metrics=metrics,
            store=CheckpointStore(self.run_dir, self.config.trainer.keep),
            screen=screen,
            stop=stop,
            write_adapter=self._write_adapter,
            best=best,
            memory=self.memory,
            validate=check,
            identity=identity | {"gradient": asdict(self.choice.plan)},
            progress=self.progress,
            saved_step=0 if self.start.is_elsewhere else self.start.step,
        )

    def _write_adapter(self, folder: Path) -> None:
        model, tokenizer = self.view.model, self.vocabulary.tokenizer
        save_adapter(folder, model, self.config.adapter, self.config.model.path, tokenizer)
        write_whole(folder / manifest.NAME, as_json(self.manifest))

    def _write_identity(self) -> None:
        write_whole(self.run_dir / CONFIG, to_yaml(self.config))
        write_whole(self.run_dir / "environment.json", as_json(environment.describe()))
        write_whole(self.run_dir / _SAMPLES, as_json(self.before))
        (self.run_dir / "summary.json").unlink(missing_ok=True)  # the run goes on: it has not ended yet

    @contextmanager
    def _metrics(self) -> Iterator[Tracked]:
        name = self.start.run_dir.parent.name
        with closing(MetricsFile(self._metrics_path(), self.start.step)) as file:
            with tracked(file, asdict(self.config), self.run_dir, name, self.start.step) as metrics:
                yield metrics

    def _metrics_path(self) -> Path:
        """Returns where the lines go, with those of the run that is continued elsewhere in place."""
        path = self.run_dir / "metrics.jsonl"
        if self.start.from_run is not None and (self.start.from_run / path.name).exists():
            with disk_guard(path):
                shutil.copy(self.start.from_run / path.name, path)
        return path

    def _sample(self) -> list[dict[str, str]]:
        return answer_all(self.view.model, self.vocabulary.tokenizer, self.config.trainer.samples)

    def _samples_before(self) -> list[dict[str, str]]:
        """Answers before training: a continued run keeps what its beginning answered."""
        if self.start.continuation is None:
            return self._sample()
        return read_samples((self.start.from_run or self.run_dir) / _SAMPLES)

    def summarise(self, status: str) -> RunResult:
        """Writes summary.json and says how the run ended."""
        progress, adapter = self.progress, self.run_dir / "adapter"
        after = self._sample()
        summary: dict[str, Any] = {
            "status": status,
            "steps": progress.step,
            "loss": progress.last_loss,
            "best_loss": progress.best_loss,
            "best_step": progress.best_step,
            "tokens": progress.tokens,
            "positions": progress.positions,
            "skipped_steps": progress.skipped,
            "seconds": progress.seconds,
            "adapter": "adapter",
            "trainable_parameters": self.report.num_trainable,
            "samples": {"before": self.before, "after": after},
        }
        write_whole(self.run_dir / "summary.json", as_json(summary))
        show_samples(self.before, after)
        words = status.replace("_", " ")
        steps = "1 step" if progress.step == 1 else f"{progress.step} steps"
        log.info("%s after %s. Run: %s  adapter: %s", words, steps, self.run_dir, adapter)
        return RunResult(self.run_dir, adapter, status, progress.step, progress.last_loss, progress.best_loss)
