"""From figures of a few layers to the whole model: a step's peak in bytes and its seconds, plan by plan.

peak = model + optimiser's state + references + the larger of
       kept of all layers + the larger of head and one layer at work + gradients outside the layers
       gradients + what the update takes
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from mlxft.config.choices import LOSS_KEYS
from mlxft.config.schema import Config
from mlxft.models.new_rows import NewRows
from mlxft.planning.calibrate import HALVES, Calibration, mlp_tokens
from mlxft.planning.shape import LayerGroup, ModelShape
from mlxft.planning.workload import Workload
from mlxft.segmented.plan import GradientPlan
from mlxft.training.objectives import HeadPlan
from mlxft.training.reference import is_the_start

_LEAST_SLOPE, _MOST_SLOPE = 0.6, 1.15  # of figures over their length, beyond what was probed
_UPDATED_AT_ONCE = 4  # of the largest array: itself, the new one and its two moments
_MOST_SHARE = 3 / 4  # of a figure, that is thought to be scores


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

    @property
    def has_halves(self) -> bool:
        """False where a plan of halves is that of whole layers."""
        return bool(self.calibration.of_half)

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
        kept = 0.0
        for number, group in enumerate(self.shape.groups):
            layers = group.count
            if plan.kind == "segmented":
                layers = -(-group.count // plan.segment_layers)
            kept += layers * self._kept_of(plan.kind, number, wanted)
        return kept

    def _kept_of(self, kind: str, number: int, wanted: Workload) -> float:
        """Returns the bytes that one layer of a group keeps."""
        first, second = self.calibration.kept[kind]
        group, attention = self.shape.groups[number], self.shape.attention
        scores = partial(attention.kept, group.window) if kind == "whole" and group.is_walked else _none
        return self._beside([first[number], second[number]], scores, wanted)

    def _working(self, plan: GradientPlan, wanted: Workload) -> float:
        """Returns the bytes beside the kept while the backward of one layer, or of a segment, runs."""
        known = self.calibration
        if plan.halves and self.has_halves:
            return self._working_by_halves(wanted)
        layers = min(plan.segment_layers, self.shape.num_walked)
        if plan.kind != "segmented" or layers == 1:
            scores = self._alive_beside_kept if plan.kind == "whole" else self._alive
            return self._beside(known.working[plan.kind], scores, wanted)
        more = max(self._kept_of("whole", number, wanted) for number in range(len(self.shape.groups)))
        segment = self._beside(known.joined, self._alive_in_all, wanted)
        return (segment + more * (layers - sum(known.layers))) * plan.in_flight

    def _working_by_halves(self, wanted: Workload) -> float:
        """Returns the bytes beside the kept of the larger half: the MLP takes so many tokens at once."""
        of_half = self.calibration.of_half
        attention = self._beside(of_half["attention"], self._alive, wanted)
        mlp = self._at(of_half["mlp"], wanted.at(mlp_tokens(self.config, wanted.length)))
        return self._at(of_half["beside"], wanted) + max(attention, mlp)

    def _alive(self, rows: int, length: int) -> float:
        """Returns the bytes of scores that are alive in the backward of the layer with most of them."""
        alive = self.shape.attention.alive
        return max((alive(group.window, rows, length) for group in self._walked), default=0.0)

    def _alive_beside_kept(self, rows: int, length: int) -> float:
        attention = self.shape.attention
        return max(
            (
                attention.alive(group.window, rows, length) - attention.kept(group.window, rows, length)
                for group in self._walked
            ),
            default=0.0,
        )

    def _alive_in_all(self, rows: int, length: int) -> float:
        """Returns the bytes of scores in a segment of all layers that were probed."""
        kept = sum(
            self.shape.attention.kept(group.window, rows, length) * count
            for group, count in zip(self.shape.groups, self.calibration.layers, strict=True)
            if group.is_walked
        )
        return kept + self._alive_beside_kept(rows, length)

    @property
    def _walked(self) -> list[LayerGroup]:
        return [group for group in self.shape.groups if group.is_walked]

    def _beside(self, both: list[float], scores: Callable[[int, int], float], wanted: Workload) -> float:
        """Returns a figure at the wanted length: near proportion but for the scores(rows, length) in it."""
        rows, (short, long) = self.calibration.rows, self.calibration.lengths
        low, high, ratio = scores(rows, short), scores(rows, long), long / short
        share = 1.0
        if high:
            # What takes most memory in a layer may be something else than its attention.
            share = most = min(_MOST_SHARE * both[1] / high, 1.0)
            if high > 2 * ratio * low:  # a window that only the longer probe goes beyond tells their share
                told = (both[1] - ratio * both[0]) / (high - ratio * low)
                share = min(max(told, most / 2), both[1] / high, 1.0)
        rest = [max(both[0] - share * low, 0.0), both[1] - share * high]
        return self._at(rest, wanted) + share * scores(wanted.rows, wanted.length)

    def _head(self, plan: GradientPlan, wanted: Workload) -> float:
        how = HeadPlan(self.config.head.kind, self.config.head.chunk)
        at_once = min(how.chunk_for(wanted.targets) or wanted.targets, wanted.targets)
        chunks = -(-wanted.targets // at_once)
        vocabulary = self.shape.vocabulary
        of_kind = self.calibration.head["segmented" if plan.kind == "segmented" else "whole"]
        logit, token, word = of_kind[min(chunks, len(of_kind)) - 1]
        return logit * at_once * vocabulary + token * wanted.targets + word * vocabulary

    def _seconds(self, plan: GradientPlan, wanted: Workload) -> float:
        """Returns the seconds of a step."""
        at = {kind: self._seconds_at(both, wanted) for kind, both in self.calibration.seconds.items()}
        whole = at["whole"]
        # They do all that whole does and run layers forward once more, less than half of that again: what
        # is beyond was other programs' doing. Segments wait for each other too.
        checkpoint = min(max(at["checkpoint"], whole), 1.5 * whole)
        each = min(max(at["segmented"], whole), 2 * whole)
        if plan.halves and self.has_halves:  # a forward of attention more, of three passes of all
            each = min(max(at[HALVES], each), each + whole / 3)
        of_kind = {
            "whole": whole,
            "checkpoint": checkpoint,
            "segmented": checkpoint + max(each - checkpoint, 0.0) / plan.segment_layers,
        }
        head = self.calibration.head_seconds * wanted.targets * self.shape.vocabulary * self.shape.width
        if self.shape.trained_head_bytes:  # one product more, of four
            head *= 4 / 3
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
        """Returns the seconds of all layers: so many a weight and position, so many a pair that attends.

        Both rates are those of the probed layers, neither below 0.
        """
        groups, attention = self.shape.groups, self.shape.attention
        # Layers below the first trained one run forward only, about a third of the work.
        shares = [1 if group.is_walked else 1 / 3 for group in groups]
        probed = [count * share for count, share in zip(self.calibration.layers, shares, strict=True)]
        every = [group.count * share for group, share in zip(groups, shares, strict=True)]

        def products(layers: list[float], length: int) -> float:
            return length * sum(n * group.weight_values for n, group in zip(layers, groups, strict=True))

        def pairs(layers: list[float], length: int) -> float:
            attended = (attention.pairs(group.window, length) for group in groups)
            return sum(n * each for n, each in zip(layers, attended, strict=True))

        (short, long), (low, high) = self.calibration.lengths, both
        ratios = [pairs(probed, length) / products(probed, length) for length in (short, long)]
        a_pair = 0.0
        if ratios[1] > ratios[0]:
            a_pair = (high / products(probed, long) - low / products(probed, short)) / (ratios[1] - ratios[0])
        # Other programs may have slowed one probe down: of attention's share no more than four times the
        # operations it has.
        share = 2 * attention.num_heads * attention.head_width * ratios[1]
        a_pair = min(max(a_pair, 0.0), min(4 * share, 1.0) * high / max(pairs(probed, long), 1.0))
        a_product = (high - a_pair * pairs(probed, long)) / products(probed, long)
        seconds = a_product * products(every, wanted.length) + a_pair * pairs(every, wanted.length)
        return seconds * wanted.rows / self.calibration.rows


def _none(rows: int, length: int) -> float:
    return 0.0


def upper_bound(shape: ModelShape, config: Config, resting_bytes: int, wanted: Workload) -> int:
    """Returns bytes that the whole backward's peak stays below, from shapes alone: several times too many.

    For each position of a walked layer, three times what its linear layers read and write, and three
    times the scores that attention keeps.
    """
    item, rows, length = shape.item_bytes, wanted.rows, wanted.length
    walked = [group for group in shape.groups if group.is_walked]
    layers = sum(
        group.count * 3 * wanted.positions * (group.linear_values + 4 * shape.width) * item
        + group.count * 3 * shape.attention.kept(group.window, rows, length)
        for group in walked
    )
    at_once = HeadPlan(config.head.kind, config.head.chunk).chunk_for(wanted.targets) or wanted.targets
    arrays = 8 if isinstance(shape.view.head_module, NewRows) else 6  # two kinds of logits are joined
    head = arrays * 4 * at_once * shape.vocabulary + 4 * 4 * wanted.targets * shape.width
    scores = 2 * max((shape.attention.alive(group.window, rows, length) for group in walked), default=0.0)
    return int(resting_bytes + layers + head + scores + 8 * shape.trained_bytes)


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
