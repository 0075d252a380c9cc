"""`mlxft train`: from a checked configuration to a run's folder with metrics, checkpoints and adapter."""

import hashlib
import json
import logging
import shutil
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Optional, Sequence

import mlx.core as mx
import yaml
from mlx.utils import tree_flatten, tree_unflatten

from mlxft.backend import backend, shape_multiple
from mlxft.config.schema import Config
from mlxft.data.batches import BatchOrder
from mlxft.data.example import Example
from mlxft.data.load import load_examples
from mlxft.errors import InputError, MlxftError
from mlxft.models.adapters import save_adapter
from mlxft.models.decoder import DecoderView, view
from mlxft.models.load import load_model, load_tokenizer, vocabulary_size
from mlxft.models.lora import apply_adapter
from mlxft.models.resolve import resolve
from mlxft.segmented.gradients import Gradient
from mlxft.training import environment, objectives, optimizer
from mlxft.training.checkpoint import CheckpointStore, write_json
from mlxft.training.folder import CONFIG, Start, find_start, locked
from mlxft.training.loop import Loop, Progress
from mlxft.training.memory import MemoryLog
from mlxft.training.metrics import MetricsFile
from mlxft.training.samples import answer_all, show_samples
from mlxft.training.screen import open_screen
from mlxft.training.signals import StopRequest, stop_on_signals
from mlxft.training.step import Stepper
from mlxft.training.validation import fixed_batches, validate
from mlxft.training.windows import Windows

log = logging.getLogger("mlxft")


@dataclass(frozen=True)
class RunResult:
    """What a run left. status: "completed" or "early_stopped"."""

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
    plain = asdict(config)
    start = find_start(composed.recipe or config.trainer.objective, plain)
    with locked(start.run_dir), _log_to(start.run_dir / "train.log"):
        try:
            return _Run(config, plain, start).train()
        except MlxftError as error:
            log.error("%s", error, extra={"file_only": True})
            raise


class _Run:
    """One run from loading to the summary; holds what its phases share."""

    def __init__(self, config: Config, plain: dict[str, Any], start: Start):
        self.config = config
        self.plain = plain
        self.start = start
        self.run_dir = start.run_dir

    def train(self) -> RunResult:
        train_rows, valid_rows = self._load_rows()
        made = self._load_model()
        self._write_identity()
        windows = self._windows(train_rows)
        total_steps = windows.total_steps(self.config.trainer.max_steps, self.config.trainer.epochs)
        before = self._samples_before(made)
        with stop_on_signals() as stop, open_screen(total_steps) as screen:
            loop = self._loop(made, windows, total_steps, screen, stop, valid_rows)
            self._restore(loop, made)
            status = loop.run()
        self._write_adapter(made, self.run_dir / "adapter")
        return self._summarise(loop.progress, status, before, self._sample(made))

    def _load_rows(self) -> tuple[list[Example], list[Example]]:
        """Rows come first: what is wrong with them is said before a large model is read."""
        self.folder = resolve(self.config.model.path, self.config.model.revision)
        self.tokenizer = load_tokenizer(self.folder, required=self.config.data.format != "tokens")
        vocabulary = vocabulary_size(self.folder)
        train_rows, report = load_examples(
            self.config.data.train, self.config.data, self.tokenizer, vocabulary
        )
        _log_lines("training rows", report.lines())
        valid_rows: list[Example] = []
        if self.config.data.valid is not None:
            valid_rows, report = load_examples(
                self.config.data.valid, self.config.data, self.tokenizer, vocabulary
            )
            _log_lines("validation rows", report.lines())
        self.fingerprint = _fingerprint(train_rows)
        return train_rows, valid_rows

    def _load_model(self) -> DecoderView:
        model, _ = load_model(self.folder, self.config.model.dtype)
        made = view(model)
        self.report = apply_adapter(model, self.config.adapter, self.config.trainer.seed)
        log.info("%s", self.report)
        return made

    def _windows(self, rows: Sequence[Example]) -> Windows:
        data, trainer = self.config.data, self.config.trainer
        order = BatchOrder([len(row.tokens) for row in rows], data.batch_size, data.shuffle, trainer.seed)
        return Windows(rows, order, trainer.accumulate)

    def _loop(
        self,
        made: DecoderView,
        windows: Windows,
        total_steps: int,
        screen,
        stop: StopRequest,
        valid_rows: Sequence[Example],
    ) -> Loop:
        trainer = self.config.trainer
        objective = objectives.build(self.config, shape_multiple())
        stepper = Stepper(
            objective,
            self._gradient(made, objective),
            optimizer.build(self.config.optimizer),
            trainer.clip_norm,
            trainer.seed,
            self.config.adapter.dropout > 0,
            should_stop=stop,
        )
        stepper.optimizer.init(made.model.trainable_parameters())
        check = None
        if valid_rows:
            batches = fixed_batches(valid_rows, self.config.data.batch_size)
            check = lambda: validate(made, objective, batches)  # noqa: E731
        return Loop(
            self.config,
            stepper,
            windows,
            total_steps,
            MetricsFile(self._metrics_path(), self._first_step()),
            CheckpointStore(self.run_dir, trainer.keep),
            screen,
            stop,
            write_adapter=lambda folder: self._write_adapter(made, folder),
            save_best=lambda: self._write_adapter(made, self.run_dir / "best"),
            validate=check,
            checkpoint_extra={"config": self.plain, "rows": self.fingerprint},
        )

    def _gradient(self, made: DecoderView, objective) -> Gradient:
        trainer = self.config.trainer
        kind = "whole" if trainer.gradient == "auto" else trainer.gradient
        log.info("gradient: %s; layout: %s", kind, trainer.layout)
        observer = MemoryLog(self.run_dir / "memory.jsonl") if trainer.log_memory else None
        compiled = backend() != "cpu" and observer is None  # phases cannot be told apart in one program
        return Gradient(made, objective, kind, compiled, trainer.deterministic, observer)

    def _metrics_path(self) -> Path:
        path = self.run_dir / "metrics.jsonl"
        if self.start.copies_metrics:
            shutil.copy(self.start.from_run / path.name, path)
        return path

    def _first_step(self) -> int:
        return self.start.checkpoint.step if self.start.checkpoint else 0

    def _restore(self, loop: Loop, made: DecoderView) -> None:
        """Puts weights, optimiser and progress back as they were when the checkpoint was written."""
        checkpoint = self.start.checkpoint
        if checkpoint is None:
            return
        if checkpoint.state["rows"] != self.fingerprint:
            raise InputError(
                f"the rows of data.train are not those that {checkpoint.folder} was trained on "
                "(their tokens differ). Put the file back, or start a new run with "
                f"adapter.init_from={checkpoint.folder}"
            )
        arrays = mx.load(str(checkpoint.folder / "adapters.safetensors"))
        _check_names(made.model.trainable_parameters(), arrays, checkpoint.folder)
        made.model.update(tree_unflatten(list(arrays.items())))
        loop.stepper.optimizer.state = tree_unflatten(list(checkpoint.optimizer_arrays().items()))
        fields = Progress.__dataclass_fields__
        loop.progress = Progress(**{name: checkpoint.state[name] for name in fields})
        mx.eval(made.model.trainable_parameters(), loop.stepper.optimizer.state)
        log.info("resumed from step %d (%s)", checkpoint.step, checkpoint.folder)

    def _write_adapter(self, made: DecoderView, folder: Path) -> None:
        save_adapter(folder, made.model, self.config.adapter, self.config.model.path)

    def _write_identity(self) -> None:
        (self.run_dir / CONFIG).write_text(yaml.safe_dump(self.plain, sort_keys=False), encoding="utf-8")
        write_json(self.run_dir / "environment.json", environment.describe())

    def _sample(self, made: DecoderView) -> list[dict[str, str]]:
        return answer_all(made.model, self.tokenizer, self.config.trainer.samples)

    def _samples_before(self, made: DecoderView) -> list[dict[str, str]]:
        """Answers before training: a continued run keeps what its beginning answered."""
        name = "samples_before.json"
        if self.start.checkpoint is None:
            write_json(self.run_dir / name, self._sample(made))
        elif self.start.copies_metrics:
            shutil.copy(self.start.from_run / name, self.run_dir / name)
        return json.loads((self.run_dir / name).read_text(encoding="utf-8"))

    def _summarise(self, progress: Progress, status: str, before: list, after: list) -> RunResult:
        adapter = self.run_dir / "adapter"
        write_json(
            self.run_dir / "summary.json",
            {
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
                "samples": {"before": before, "after": after},
            },
        )
        show_samples(before, after)
        log.info(
            "%s after %d steps. Run: %s  adapter: %s",
            status.replace("_", " "),
            progress.step,
            self.run_dir,
            adapter,
        )
        return RunResult(self.run_dir, adapter, status, progress.step, progress.last_loss, progress.best_loss)


def _fingerprint(rows: Sequence[Example]) -> str:
    digest = hashlib.sha256()
    for row in rows:
        digest.update(len(row.tokens).to_bytes(8, "little"))
        digest.update(row.tokens.tobytes())
        digest.update(row.mask.tobytes())
    return digest.hexdigest()


def _check_names(params: Any, arrays: dict[str, mx.array], folder: Path) -> None:
    expected = {name: tuple(array.shape) for name, array in tree_flatten(params)}
    found = {name: tuple(array.shape) for name, array in arrays.items()}
    if expected != found:
        odd = sorted(set(expected.items()) ^ set(found.items()))[:6]
        raise InputError(f"{folder} trained other arrays than this configuration does, for instance {odd}")


def _log_lines(what: str, lines: Sequence[str]) -> None:
    for line in lines:
        log.info("%s: %s", what, line)


@contextmanager
def _log_to(path: Path):
    handler = logging.FileHandler(path, encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    try:
        yield
    finally:
        log.removeHandler(handler)
        handler.close()
