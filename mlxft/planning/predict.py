"""From figures of a few layers to the whole model: a step's peak in bytes and its seconds, plan by plan.

peak = model + optimiser's state + references + the larger of
       kept of all layers + the larger of head and one layer at work + gradients outside the layers
       gradients + what the update takes
"""

from dataclasses import dataclass

from mlxft.backend import backend
from mlxft.config.choices import LOSS_KEYS
from mlxft.config.schema import Config
from mlxft.layouts.attention import scores_bytes
from mlxft.planning.calibrate import MOST_CHUNKS, Calibration
from mlxft.planning.shape import ModelShape
from mlxft.planning.workload import Workload
from mlxft.segmented.build import GradientPlan
from mlxft.training.objectives import HeadPlan
from mlxft.training.reference import is_the_start

_FEWEST_QUERIES = 32  # of an attention block, whatever its scores take
_LEAST_SLOPE, _MOST_SLOPE = 0.6, 1.15  # of figures over their length, beyond what was probed
_UPDATED_AT_ONCE = 4  # of the largest array: itself, the new one and its two moments
_SCORES_ALIVE = 4  # blocks' worth of scores in the backward: scores, weights and their gradients


@dataclass(frozen=True)
class Prediction:
    """What a step takes. layers: kept of all layers. working: of one layer or segment, beside the kept."""

    plan: GradientPlan
    peak_bytes: int
    seconds: float
    layers_bytes: int
    working_bytes: int
    head_bytes: int


class Predictor:
    """Predicts steps of one model and configuration.

    resting_bytes: what is there before a step.
    """

    def __init__(self, shape: ModelShape, config: Config, resting_bytes: int, calibration: Calibration):
        self.shape, self.config = shape, config
        self.resting_bytes = resting_bytes
        self.calibration = calibration

    def __call__(self, plan: GradientPlan, wanted: Workload) -> Prediction:
        """Returns what a step of one such micro-batch takes at the most."""
        shape = self.shape
        kept, working = self._kept(plan, wanted), self._working(plan, wanted)
        gradients = shape.trained_bytes * (2 if self.config.trainer.accumulate > 1 else 1)
        head = self._head(plan, wanted)
        in_layers = shape.trained_bytes - shape.outside_bytes
        # A checkpoint's layers are run again when the head is done with. While segments are walked, what
        # entered them gives way to gradients.
        at_head = self._kept(GradientPlan("segmented"), wanted) if plan.kind == "checkpoint" else kept
        alive = max(kept, in_layers) if plan.kind == "segmented" else kept
        window = max(at_head + head, alive + working + shape.outside_bytes)
        window += gradients - shape.trained_bytes
        update = gradients + self.calibration.update + _UPDATED_AT_ONCE * shape.largest_outside_bytes
        peak = self.resting_bytes + max(window, update)
        seconds = self._seconds(plan, wanted)
        return Prediction(plan, int(peak), seconds, int(kept), int(working), int(head))

    def longest(self, plan: GradientPlan, wanted: Workload, limit: int, most: int = 2**20) -> int:
        """Returns the longest rows, up to `most`, of which a batch like `wanted` fits the limit; 0: none."""
        return _largest(lambda length: self(plan, wanted.at(length)).peak_bytes <= limit, most)

    def most_rows(self, plan: GradientPlan, wanted: Workload, limit: int) -> int:
        """Returns how many rows of the wanted length, at most so many, fit the limit; 0: not one."""
        fits = lambda rows: self(plan, wanted.at(wanted.length, rows)).peak_bytes <= limit  # noqa: E731
        return _largest(fits, wanted.rows)

    def _kept(self, plan: GradientPlan, wanted: Workload) -> float:
        """Returns the bytes that all layers keep; of segments only what enters each is kept."""
        both = self.calibration.kept[plan.kind]
        kept = 0.0
        for number, group in enumerate(self.shape.groups):
            layers = group.count
            if plan.kind == "segmented":
                layers = -(-group.count // plan.segment_layers)
            kept += layers * self._at([both[0][number], both[1][number]], wanted)
        return kept

    def _working(self, plan: GradientPlan, wanted: Workload) -> float:
        known, blocks = self.calibration, self._longer_blocks(wanted)
        layers = min(plan.segment_layers, self.shape.num_walked)
        if plan.kind != "segmented" or layers == 1:
            return self._at(known.working[plan.kind], wanted) + blocks
        first, second = known.kept["whole"]
        more = max(self._at(list(both), wanted) for both in zip(first, second, strict=True))
        segment = self._at(known.joined, wanted) + more * (layers - known.joined_layers)
        return segment * plan.in_flight + blocks

    def _longer_blocks(self, wanted: Workload) -> float:
        """Returns what attention blocks take beyond those of the probes: they keep so many queries."""
        if backend() == "cuda" and self.shape.item_bytes == 2:
            return 0.0

        def block(rows: int, length: int) -> float:
            return max(scores_bytes(), 4 * rows * self.shape.num_heads * _FEWEST_QUERIES * length)

        probed = self.calibration.lengths[1]
        if wanted.length <= probed:
            return 0.0
        return _SCORES_ALIVE * (block(wanted.rows, wanted.length) - block(wanted.rows, probed))

    def _head(self, plan: GradientPlan, wanted: Workload) -> float:
        how = HeadPlan(self.config.head.kind, self.config.head.chunk)
        at_once = min(how.chunk_for(wanted.targets) or wanted.targets, wanted.targets)
        chunks = min(-(-wanted.targets // at_once), MOST_CHUNKS)
        logit, token, word = self.calibration.head["segmented" if plan.kind == "segmented" else "whole"][
            chunks - 1
        ]
        vocabulary = self.shape.vocabulary
        return max(logit * at_once * vocabulary + token * wanted.targets + word * vocabulary, 0.0)

    def _seconds(self, plan: GradientPlan, wanted: Workload) -> float:
        """Returns the seconds of a step: a weight's at this length, times the weights that are walked."""
        # Layers below the first trained one run forward only, about a third of the work.
        walked = sum(
            group.count * group.weight_values * (1 if group.is_walked else 1 / 3)
            for group in self.shape.groups
        )
        at = {
            kind: self._seconds_at(both, wanted) * walked for kind, both in self.calibration.seconds.items()
        }
        whole = at["whole"]
        # They do all that whole does and run layers forward once more, less than half of that again: what
        # is beyond was other programs' doing. Segments wait for each other too.
        checkpoint = min(max(at["checkpoint"], whole), 1.5 * whole)
        each = min(max(at["segmented"], whole), 2 * whole)
        of_kind = {
            "whole": whole,
            "checkpoint": checkpoint,
            "segmented": checkpoint + max(each - checkpoint, 0.0) / plan.segment_layers,
        }
        head = self.calibration.head_seconds * wanted.targets * self.shape.vocabulary * self.shape.width
        return (of_kind[plan.kind] + head) * self.config.trainer.accumulate

    def _at(self, both: list[float], wanted: Workload) -> float:
        """Returns a figure at the wanted length and number of rows, from those at the probed lengths."""
        (short, long), (low, high), length = self.calibration.lengths, both, wanted.length
        if length <= short or long == short:
            value = (low if length <= short else high) * length / short
        else:
            slope = (high - low) / (long - short)
            if length > long:  # peaks of small probes are not smooth: near proportion is safer than far
                slope = min(max(slope, _LEAST_SLOPE * high / long), _MOST_SLOPE * high / long)
            value = high + slope * (length - long)
        return value * wanted.rows / self.calibration.rows

    def _seconds_at(self, both: list[float], wanted: Workload) -> float:
        """Returns seconds at the wanted length: u T + w T^2 through both points, neither below 0."""
        (short, long), (low, high) = self.calibration.lengths, both
        square = 0.0 if long == short else (high / long - low / short) / (long - short)
        # Other programs may have slowed one probe down: of attention's share no more than four times the
        # operations it has.
        most = min(4 * self._attention_share(long), 1.0) * high / long**2
        square = min(max(square, 0.0), most)
        linear = high / long - square * long
        seconds = linear * wanted.length + square * wanted.length**2
        return seconds * wanted.rows / self.calibration.rows

    def _attention_share(self, length: int) -> float:
        """Returns the operations of attention over those of the linear layers, at that length."""
        weights = max(group.weight_values for group in self.shape.groups)
        return self.shape.width * length / max(weights, 1)


def upper_bound(shape: ModelShape, config: Config, resting_bytes: int, wanted: Workload) -> int:
    """Returns bytes that the whole backward's peak stays below, from shapes alone: several times too many.

    For each position of a walked layer, three times what its linear layers read and write, and three
    times the scores that attention keeps.
    """
    heads, item = shape.num_heads, shape.item_bytes
    reach = min(wanted.length, 2 * shape.window) if shape.window else wanted.length
    scores = 4.0 * wanted.positions * heads * reach
    scores = scores if shape.window else min(scores, scores_bytes())
    walked = [group for group in shape.groups if group.is_walked]
    layers = sum(
        group.count * 3 * (wanted.positions * (group.linear_values + 4 * shape.width) * item + scores)
        for group in walked
    )
    at_once = HeadPlan(config.head.kind, config.head.chunk).chunk_for(wanted.targets) or wanted.targets
    head = 6 * 4 * at_once * shape.vocabulary + 4 * 4 * wanted.targets * shape.width
    blocks = (
        2 * _SCORES_ALIVE * max(scores_bytes(), 4 * wanted.rows * heads * _FEWEST_QUERIES * wanted.length)
    )
    return int(resting_bytes + layers + head + blocks + 8 * shape.trained_bytes)


def resting_bytes(shape: ModelShape, config: Config, reference_bytes: int = 0) -> int:
    """Returns the bytes of what is there before a step: model, adapter, optimiser's state, references.

    reference_bytes: of a model that is the reference.
    """
    has_reference = "reference" in LOSS_KEYS[config.trainer.objective]
    start = shape.trained_bytes if has_reference and is_the_start(config) else 0
    return shape.model_bytes + shape.state_bytes + start + reference_bytes


def _largest(fits, most: int) -> int:
    """Returns the largest whole number up to `most` that `fits` is true for; 0 if for none."""
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        if fits(middle):
            low = middle
        else:
            high = middle - 1
    return low
