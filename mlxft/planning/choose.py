"""The plan a run takes: what was asked for, or the fastest that fits into memory; else what would fit."""

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Optional

import mlx.core as mx

from mlxft.available_memory import memory_limit_bytes
from mlxft.backend import backend
from mlxft.config.schema import Config
from mlxft.errors import GuardStop, InputError
from mlxft.models.new_tokens import new_tokens_of
from mlxft.planning.calibrate import calibrate, figures_file
from mlxft.planning.predict import Prediction, Predictor, resting_bytes, upper_bound
from mlxft.planning.shape import ModelShape, model_bytes_in, shape_in
from mlxft.planning.workload import Workload
from mlxft.segmented.plan import GradientPlan
from mlxft.sizes import written

SEGMENT_LAYERS = (1, 2, 4)
_OBVIOUS_SHARE = 1 / 4  # of the limit: a bound below it needs no probe
_NEAR_SHARE = 1 / 2  # of the limit: a prediction above it is tried
_AS_FAST = 1.05  # seconds apart by less are no reason
_LESS = (
    "Shorter rows (data.max_length), fewer of them at once (data.batch_size, with more trainer.accumulate) "
    "or a smaller head.chunk take less"
)


@dataclass(frozen=True)
class Choice:
    """What is taken and why. peak_bytes: predicted, or, where `is_bound`, what it stays below.

    help: what would fit, where nothing does.
    """

    plan: GradientPlan
    peak_bytes: int
    limit_bytes: int
    is_bound: bool
    wanted: Workload
    help: str = ""

    @property
    def fits(self) -> bool:
        return self.peak_bytes <= self.limit_bytes

    @property
    def is_near(self) -> bool:
        """True where the longest batch is worth a trial.

        The prediction is within a fifth on what was measured; layouts, families and backends that were
        not could be twice as far off as it thinks, no further.
        """
        return self.peak_bytes > _NEAR_SHARE * self.limit_bytes

    def __str__(self) -> str:
        what = "less than" if self.is_bound else "about"
        return f"{self.plan}; peak {what} {written(self.peak_bytes)} of {written(self.limit_bytes)}"


class Planner:
    """Predicts and chooses for one model, configuration and largest micro-batch.

    shape: of the model, loaded or not; a shape of its own is made of the headers in `folder` for probes.
    reference: the folder of a model that is the reference of the loss.
    """

    def __init__(
        self,
        config: Config,
        folder: Path,
        wanted: Workload,
        shape: ModelShape,
        reference: Optional[Path] = None,
    ):
        self.config, self.folder, self.wanted, self.shape = config, folder, wanted, shape
        reference_bytes = model_bytes_in(reference, config.model.dtype) if reference else 0
        self.resting_bytes = resting_bytes(shape, config, reference_bytes)
        self.limit_bytes = memory_limit_bytes(config.trainer.memory_limit)
        self.bound_bytes = upper_bound(shape, config, self.resting_bytes, wanted)
        self._predictor: Optional[Predictor] = None
        self.measured_in: Optional[Path] = None  # the file of the figures that predictions stand on

    @property
    def predictor(self) -> Predictor:
        """What predicts, calibrated when it is first asked for."""
        if self._predictor is None:
            shape = shape_in(self.config, self.folder, new_tokens_of(self.shape.view.model))
            self.measured_in = figures_file(shape, self.config, self.wanted)
            calibration = calibrate(shape, self.config, self.wanted)
            gc.collect()  # the probes' arrays: modules and what was traced on them refer to each other
            mx.clear_cache()
            self._predictor = Predictor(self.shape, self.config, self.resting_bytes, calibration)
        return self._predictor

    def plans(self) -> list[GradientPlan]:
        """Returns what the configuration leaves to choose from, every kind for trainer.gradient=auto."""
        trainer = self.config.trainer
        segmented = self._segmented()
        if trainer.segment_layers == "half":
            segmented = [self._by_halves()]
        elif trainer.segment_layers != "auto":
            self._check_layers(trainer.segment_layers)
            segmented = [GradientPlan("segmented", trainer.segment_layers, self._in_flight())]
        if trainer.gradient == "segmented":
            return segmented
        if trainer.gradient != "auto":
            return [GradientPlan(trainer.gradient)]
        if not self.shape.view.in_parts:
            return [GradientPlan("whole")]
        return [GradientPlan("whole"), GradientPlan("checkpoint"), *segmented]

    def _check_layers(self, asked: int) -> None:
        """Raises InputError for a segment of more layers than the backward goes through."""
        walked, all_layers = max(self.shape.num_walked, 1), self.shape.view.num_layers
        if asked > walked:
            few = "" if walked == all_layers else f" the {walked} from the lowest trained one on of"
            raise InputError(
                f"trainer.segment_layers={asked}: the backward goes through{few} the model's {all_layers} "
                f"layers. Give at most {walked}, or auto"
            )

    def all_plans(self) -> list[GradientPlan]:
        """Returns every way to run the backward that differs from the others, and what was asked for."""
        *whole_layers, halves = self._segmented()
        every = [GradientPlan("whole"), GradientPlan("checkpoint"), halves, *whole_layers]
        return list(dict.fromkeys([*self._that_differ(every), *self._that_differ(self.plans())]))

    def _segmented(self) -> list[GradientPlan]:
        sizes = [size for size in SEGMENT_LAYERS if size <= max(self.shape.num_walked, 1)]
        whole_layers = [GradientPlan("segmented", size, self._in_flight()) for size in sizes]
        return [*whole_layers, self._by_halves()]

    def _by_halves(self) -> GradientPlan:
        return GradientPlan("segmented", 1, self._in_flight(), halves=True)

    def _that_differ(self, plans: Sequence[GradientPlan]) -> Sequence[GradientPlan]:
        """Returns them without halves where layers have none: those would be whole ones."""
        if len(plans) == 1 or self.predictor.has_halves:
            return plans
        return [plan for plan in plans if not plan.halves]

    def choose(self, before: Optional[GradientPlan] = None) -> Choice:
        """Returns what is taken. before: the plan of the run that is continued, kept if it fits."""
        plans = self.plans()
        first = before if before in plans else plans[0]
        if self.bound_bytes < _OBVIOUS_SHARE * self.limit_bytes or not self.shape.can_probe:
            fits = self.bound_bytes <= self.limit_bytes
            plan = first if fits or len(plans) == 1 else GradientPlan("segmented", 1, self._in_flight())
            return Choice(plan, self.bound_bytes, self.limit_bytes, True, self.wanted)
        predicted = [self.predictor(plan, self.wanted) for plan in self._that_differ(plans)]
        taken = fastest(predicted, self.limit_bytes)
        if before in plans:
            again = self.predictor(before, self.wanted)
            taken = again if again.peak_bytes <= self.limit_bytes else taken
        help = self.what_fits(taken.plan) if taken.peak_bytes > _NEAR_SHARE * self.limit_bytes else ""
        return Choice(taken.plan, taken.peak_bytes, self.limit_bytes, False, self.wanted, help)

    def what_fits(self, asked: GradientPlan) -> str:
        """Returns, as a sentence, what of other backwards, shorter rows and fewer of them fits the limit."""
        data, limit, wanted = self.config.data, self.limit_bytes, self.wanted
        predicted = [self.predictor(plan, wanted) for plan in self._that_differ(self._segmented())]
        least = min(predicted, key=lambda each: each.peak_bytes)
        options = []
        if least.peak_bytes <= limit and asked != least.plan:
            how = "trainer=segmented" if asked.kind != "segmented" else _layers_of(least.plan)
            options.append(f"{how} (about {written(least.peak_bytes)})")
        for plan in dict.fromkeys((asked, least.plan)):
            name = f"trainer.gradient={plan.kind}"
            if plan.kind == asked.kind == "segmented" and plan != asked:
                name = _layers_of(plan)
            length = wanted.max_length_of(self.predictor.longest(plan, wanted, limit, wanted.length))
            if 2 < length < wanted.max_length:
                options.append(f"data.max_length={length} with {name}")
            rows = self.predictor.most_rows(plan, wanted, limit)
            if data.batch_tokens is not None and 0 < rows < wanted.rows:
                options.append(f"data.batch_tokens={rows * wanted.length} with {name}")
            elif 0 < wanted.batch_size_of(rows) < wanted.batch_size:
                options.append(f"data.batch_size={wanted.batch_size_of(rows)} with {name}")
        if not options:
            return (
                "Nothing that was looked at fits: it takes a smaller model or adapter, a smaller head.chunk, "
                "or more memory"
            )
        return "By prediction these fit: " + "; ".join(options)

    def _in_flight(self) -> int:
        # Waiting after each segment leaves a GPU idle while the next one is prepared.
        asked = self.config.trainer.in_flight
        return (1 if backend() == "cpu" else 2) if asked == "auto" else asked


def fastest(predictions: Sequence[Prediction], limit: int) -> Prediction:
    """Returns the fastest of those that fit, of equally fast ones that of least memory; else the smallest."""
    fitting = [each for each in predictions if each.peak_bytes <= limit]
    if not fitting:
        return min(predictions, key=lambda each: each.peak_bytes)
    whole = [each for each in fitting if each.plan.kind == "whole"]
    if whole:  # nothing computes less
        return whole[0]
    # Nothing computes more than halves, whatever a busy machine has measured.
    fitting = [each for each in fitting if not each.plan.halves] or fitting
    best = min(each.seconds for each in fitting)
    return min(
        (each for each in fitting if each.seconds <= _AS_FAST * best), key=lambda each: each.peak_bytes
    )


def _layers_of(plan: GradientPlan) -> str:
    return f"trainer.segment_layers={'half' if plan.halves else plan.segment_layers}"


def refuse(choice: Choice) -> None:
    """Raises GuardStop where a CPU would be out of memory: the kernel would end the process, or swap.

    A bound is no prediction: what it says may well fit. A GPU's allocator says so itself.
    """
    if choice.fits or choice.is_bound or backend() != "cpu":
        return
    raise GuardStop(
        f"the longest batch ({choice.wanted}) does not fit: {choice.plan} takes about "
        f"{written(choice.peak_bytes)} and there are {written(choice.limit_bytes)} "
        f"(trainer.memory_limit). {choice.help}"
    )


def try_longest(attempt: Callable[[], object], choice: Choice) -> None:
    """Runs `attempt`, a gradient of the longest batch.

    Raises: GuardStop with what would fit, where there is no memory left or, on a CPU, which knows no limit of
    its own, more was taken than there is.
    """
    mx.reset_peak_memory()
    try:
        attempt()
    except GuardStop as error:
        raise GuardStop(f"{error}. {choice.help}" if choice.help else str(error)) from error
    peak_bytes = mx.get_peak_memory()
    if backend() == "cpu" and peak_bytes > choice.limit_bytes:
        raise GuardStop(
            f"the longest batch ({choice.wanted}) does not fit: {choice.plan} took {written(peak_bytes)} and "
            f"there are {written(choice.limit_bytes)} (trainer.memory_limit). {choice.help or _LESS}"
        )
