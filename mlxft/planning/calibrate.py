"""The figures that predictions stand on: measured once a machine, library version and shape, and kept."""

import hashlib
import json
import logging
import math
import os
import platform
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any, Optional

import mlx.core as mx

import mlxft
from mlxft.backend import backend, shape_multiple
from mlxft.blas import num_threads
from mlxft.config.schema import Config
from mlxft.planning.probe import Cost, ProbeModel, only_new_garbage
from mlxft.planning.shape import LayerGroup, ModelShape
from mlxft.planning.workload import Workload
from mlxft.segmented import segments
from mlxft.segmented.plan import GradientPlan

log = logging.getLogger("mlxft")

KINDS = ("whole", "checkpoint", "segmented")
HALVES = "halves"  # of segments, for models whose layers have them
_POSITIONS = 1024  # of the longer probe, unless attention has to be longer to be as in long rows
_SURELY = 1.2  # times the length from which on attention is in blocks
_MOST_ROWS = 4  # of a probe: more cost as much each
_LONGEST_WINDOW = {"cpu": 512, "metal": 4096, "cuda": 4096}  # that probes are made longer for
_LAYER_VOCABULARY = 61  # small, for the head is not to count. No other axis is likely to be as long.
# Of heads: tokens, and the larger vocabulary over the hidden width. Logits have to be what takes most memory,
# as they do in real ones.
_HEAD_TOKENS, _HEAD_RATIO = (16, 32), 32
_SMALLEST_VOCABULARY = 1000
# Small heads are measured again, and the largest peak is that of larger ones: MLX runs less far ahead.
_HEAD_REPEATS, _QUICK_S = 3, 0.02
MOST_CHUNKS = 4  # of the head: a backend that runs ahead has a few of them alive, not more


@dataclass(frozen=True)
class Calibration:
    """What probes measured, for `rows` rows of each of two `lengths`.

    layers: those that were probed of each group. kept: by kind and length, bytes that one layer of each
    group adds to a step's peak. working: by kind and length, bytes beside those. joined: by length, those of
    one segment of all `layers`. seconds: by kind and length, of a step of these. Where any layer has
    halves, HALVES is such a kind, and of_half has, by half and length, the bytes that the backward of one
    takes, of all positions at once, and what a step has "beside" the larger one. head: by kind, for 1 to
    MOST_CHUNKS chunks, bytes a logit at once, a supervised token, a token of the vocabulary. head_seconds:
    of a logit, over the hidden width. update: bytes that an optimiser's update of a few layers takes beside
    what was there; of many it takes no more, array by array.
    """

    rows: int
    lengths: tuple[int, int]
    layers: list[int]
    kept: dict[str, list[list[float]]]
    working: dict[str, list[float]]
    joined: list[float]
    seconds: dict[str, list[float]]
    of_half: dict[str, list[float]]
    head: dict[str, list[list[float]]]
    head_seconds: float
    update: float


def calibrate(shape: ModelShape, config: Config, wanted: Workload) -> Calibration:
    """Returns the calibration for rows like those of `wanted`, measured now or kept from before.

    Probes change the modules of `shape`; its numbers stay as they are.
    """
    path = figures_file(shape, config, wanted)
    known = _kept(path)
    if known is not None:
        return known
    log.info("measuring what a layer takes in memory and time, once for this machine and model")
    began = time.perf_counter()
    with only_new_garbage():
        measured = _Probes(shape, config, *_probed(shape, wanted)).measure()
    log.info("a layer's memory and time, measured in %.1f s: kept in %s", time.perf_counter() - began, path)
    _keep(path, measured)
    return measured


def figures_file(shape: ModelShape, config: Config, wanted: Workload) -> Path:
    """Returns the file that keeps the calibration for rows like those of `wanted`; without it, they are
    measured again."""
    return _cache_folder() / f"{_key(config, shape, *_probed(shape, wanted))}.json"


def _probed(shape: ModelShape, wanted: Workload) -> tuple[int, tuple[int, int]]:
    """Returns how many rows are probed, and the lengths of them."""
    rows = min(wanted.rows, _MOST_ROWS)
    return rows, probe_lengths(shape, rows, wanted.length)


def probe_lengths(shape: ModelShape, rows: int, wanted_length: int) -> tuple[int, int]:
    """Returns the two lengths that so many rows are probed at, no longer than is wanted.

    Attention keeps the scores of short rows and makes those of long ones again, block by block; a sliding
    window changes longer rows only. What is wanted is told from two probes that are long in both ways.
    """
    blocked = 0 if shape.attention.is_fused else shape.attention.longest_at_once(rows)
    window = shape.window or 0
    # Which is not seen in shorter rows.
    window = window if window < wanted_length and window <= _LONGEST_WINDOW[backend()] else 0
    long = math.ceil(max(_SURELY * blocked, 2 * window, _POSITIONS / 2 / rows))
    multiple = shape_multiple()
    longer = min(2 * -(-long // multiple) * multiple, wanted_length)
    return max(longer // 2 // multiple, 1) * multiple, longer


@dataclass
class _AtLength:
    """Figures of a `Calibration`, of one length."""

    kept: dict[str, list[float]] = field(default_factory=dict)
    working: dict[str, float] = field(default_factory=dict)
    joined: float = 0.0
    seconds: dict[str, float] = field(default_factory=dict)
    of_half: dict[str, float] = field(default_factory=dict)
    update: float = 0.0


def _number_in(group: LayerGroup, indices: Sequence[int]) -> int:
    return sum(index in group.indices for index in indices)


def mlp_tokens(config: Config, length: int) -> int:
    """Returns how many tokens of a row of that length the MLP takes at once, of layers in halves."""
    return length if config.adapter.dropout else min(length, segments.MLP_TOKENS)


class _Probes:
    """Small models of a shape, and what they took."""

    def __init__(self, shape: ModelShape, config: Config, rows: int, lengths: tuple[int, int]):
        self.shape, self.config, self.rows, self.lengths = shape, config, rows, lengths
        self.model = ProbeModel(shape, config)
        self.in_flight = 1 if backend() == "cpu" else 2
        groups = shape.groups
        # The first layer of all has no gradient to hand on: where it is its group's, one more.
        self.base = [group.indices[0] for group in groups] if len(groups) > 1 else list(groups[0].indices[:2])

    def measure(self) -> Calibration:
        """Returns everything."""
        self.model.cut(_LAYER_VOCABULARY)
        self.model.choose(self.base)
        kinds = (*KINDS, HALVES) if self.model.with_halves() else KINDS
        lengths = [self._at(length, kinds) for length in self.lengths]
        if backend() == "cpu":  # a GPU repeats each step at once, since it compiles first
            for length, at in zip(self.lengths, lengths, strict=True):
                self._time_again(length, at)
        head, head_seconds = self._head()
        return Calibration(
            rows=self.rows,
            lengths=self.lengths,
            layers=[_number_in(group, self.base) for group in self.shape.groups],
            kept={kind: [at.kept[kind] for at in lengths] for kind in KINDS},
            working={kind: [at.working[kind] for at in lengths] for kind in KINDS},
            joined=[at.joined for at in lengths],
            seconds={kind: [at.seconds[kind] for at in lengths] for kind in kinds},
            of_half={name: [at.of_half[name] for at in lengths] for name in lengths[0].of_half},
            head=head,
            head_seconds=head_seconds,
            update=max(at.update for at in lengths),
        )

    def _at(self, length: int, kinds: Sequence[str]) -> _AtLength:
        """Returns the figures of rows of one length."""
        shape, groups = self.shape, self.shape.groups
        found = _AtLength()
        entering = shape.width * shape.item_bytes * self.rows * length  # a segment
        for kind in kinds:
            cost, update = self._step(self.base, self._plan(kind), length)
            found.update, found.seconds[kind] = max(found.update, update), cost.seconds
            base = self._base_of(kind)
            if len(base) > len(self.base):
                cost, _ = self._step(base, self._plan(kind), length)
            if kind in ("segmented", HALVES):
                added = [float(entering * group.is_walked) for group in groups]
            else:
                added = [self._added(base, group, kind, length, cost) for group in groups]
            own = sum(each * _number_in(group, base) for each, group in zip(added, groups, strict=True))
            found.kept[kind] = added
            found.working[kind] = max(cost.num_bytes - own, 0.0)
        # A segment with another one below it, to which it hands a gradient on.
        more = [index for group in groups for index in group.indices if index not in self.base][:1]
        plan = GradientPlan("segmented", len(self.base), self.in_flight)
        cost, _ = self._step([*self.base, *more], plan, length)
        found.joined = max(cost.num_bytes - entering * (1 + len(more)), 0.0)
        if HALVES in kinds:
            found.of_half = self._halves(found.working[HALVES], length)
        return found

    def _time_again(self, length: int, found: _AtLength) -> None:
        """Takes the steps once more, a while later: other programs slow some down, for seconds at a time."""
        for kind, before in found.seconds.items():
            cost, _ = self._step(self.base, self._plan(kind), length)
            found.seconds[kind] = min(before, cost.seconds)

    def _halves(self, together: float, length: int) -> dict[str, float]:
        """Returns `Calibration.of_half` of one length, at which a step took so much `together`."""
        self.model.choose(self.base)
        attention, mlp = (self.model.half(half, self.rows, length) for half in ("attention", "mlp"))
        larger = max(attention, mlp * mlp_tokens(self.config, length) / length)
        return {"attention": attention, "mlp": mlp, "beside": max(together - larger, 0.0)}

    def _base_of(self, kind: str) -> list[int]:
        """Returns the layers whose memory, beside that of one more, tells the memory of all."""
        if kind != "checkpoint":
            return self.base
        # Which computes some layers again at a time, and no more of them where there are more.
        further = [self._next_to(self.base, group) for group in self.shape.groups]
        return [*self.base, *(index for index in further if index is not None)]

    def _plan(self, kind: str) -> GradientPlan:
        if kind == HALVES:
            return GradientPlan("segmented", 1, self.in_flight, halves=True)
        return GradientPlan(kind, 1, self.in_flight)

    def _step(self, indices: Sequence[int], plan: GradientPlan, length: int) -> tuple[Cost, float]:
        self.model.choose(indices)
        repeat = 1 if backend() == "cpu" else 3  # a GPU compiles first
        return self.model.step(plan, self.rows, length, repeat)

    def _added(self, base: Sequence[int], group: LayerGroup, kind: str, length: int, cost: Cost) -> float:
        """Returns the bytes that one more layer of a group adds to the cost of a base; 0 for one with all."""
        more = self._next_to(base, group)
        if more is None:
            return 0.0
        self.model.choose([*base, more])
        larger, _ = self.model.step(self._plan(kind), self.rows, length)
        return max(larger.num_bytes - cost.num_bytes, 0.0)

    def _next_to(self, base: Sequence[int], group: LayerGroup) -> Optional[int]:
        """Returns a layer of the group that is not among those of a base."""
        return next((index for index in group.indices if index not in base), None)

    def _head(self) -> tuple[dict[str, list[list[float]]], float]:
        """Returns what `Calibration.head` says, and the seconds of a product."""
        if self.config.adapter.kind == "full":
            self.shape.view.head_module.freeze()  # its gradient would hide what few logits take
        small, large = _HEAD_TOKENS
        many = max(min(self.shape.vocabulary, _HEAD_RATIO * self.shape.width), _SMALLEST_VOCABULARY)
        few, many = self.model.unlike_any_axis(many // 2), self.model.unlike_any_axis(many)
        costs: dict[tuple, Cost] = {}
        for vocabulary, tokens in ((few, small), (few, large), (many, small)):
            self.model.cut(vocabulary)
            for chunks in range(1, MOST_CHUNKS + 1):
                chunk = tokens if chunks > 1 else None
                for kind, head in (("whole", self.model.head), ("segmented", self.model.segmented_head)):
                    runs = [head(tokens * chunks, chunk)]
                    while runs[-1].seconds < _QUICK_S and len(runs) < _HEAD_REPEATS:
                        runs.append(head(tokens * chunks, chunk))
                    most, fastest = max(run.num_bytes for run in runs), min(run.seconds for run in runs)
                    costs[kind, chunks, tokens, vocabulary] = Cost(most, fastest)
        figures: dict[str, list[list[float]]] = {kind: [] for kind in ("whole", "segmented")}
        for kind, of_kind in figures.items():
            for chunks in range(1, MOST_CHUNKS + 1):
                # bytes = logit x tokens x vocabulary + token x tokens x chunks + word x vocabulary
                one = costs[kind, chunks, small, few].num_bytes
                by_token = (costs[kind, chunks, large, few].num_bytes - one) / (large - small)
                by_word = (costs[kind, chunks, small, many].num_bytes - one) / (many - few)
                logit = (by_token * small + by_word * few - one) / (small * few)
                of_kind.append([logit, (by_token - logit * few) / chunks, by_word - logit * small])
        products = large * MOST_CHUNKS * few * self.shape.width
        return figures, costs["whole", MOST_CHUNKS, large, few].seconds / products


def _key(config: Config, shape: ModelShape, rows: int, lengths: tuple[int, int]) -> str:
    """Returns a name for all that the figures depend on."""
    groups = [(group.is_walked, group.window, group.arrays) for group in shape.groups]
    about = {
        "machine": (platform.node(), platform.machine(), str(mx.device_info().get("device_name"))),
        "backend": (backend(), os.cpu_count(), num_threads()),
        "versions": (version("mlx"), version("mlx-lm"), mlxft.__version__, _code()),
        "shape": (type(shape.view).__name__, groups, shape.width, shape.attention, shape.window),
        "adapter": (config.adapter.dropout, config.adapter.kind),
        "head": type(shape.view.head_module).__name__,
        "optimizer": asdict(config.optimizer),
        "how": (config.trainer.deterministic, config.trainer.objective == "sft"),
        "probes": (rows, lengths),
    }
    return hashlib.sha256(repr(about).encode()).hexdigest()[:32]


def _code() -> str:
    """Returns a digest of the code whose memory is measured."""
    digest = hashlib.sha256()
    root = Path(mlxft.__file__).parent
    for package in ("layouts", "losses", "models", "planning", "segmented"):
        for file in sorted((root / package).rglob("*.py")):
            digest.update(file.read_bytes())
    return digest.hexdigest()


def _cache_folder() -> Path:
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "mlxft" / "plans"


def _kept(path: Path) -> Optional[Calibration]:
    """Returns what was kept, or None: not there, or damaged in any way, and so measured again."""
    try:
        kept = json.loads(path.read_text(encoding="utf-8"))
        figures = kept["figures"]
        if kept["sha256"] != _digest(figures):
            raise ValueError("what it holds has changed")
        return Calibration(**figures | {"lengths": tuple(figures["lengths"])})
    except FileNotFoundError:
        return None
    except (OSError, ValueError, LookupError, TypeError, RecursionError) as error:
        log.debug("%s is damaged, and measured again: %s", path, error)
        return None


def _keep(path: Path, calibration: Calibration) -> None:
    """Writes the figures for later; where that cannot be, this run has them all the same."""
    figures = asdict(calibration)
    aside = path.with_name(f".{path.stem}.{os.getpid()}.json")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        aside.write_text(json.dumps({"sha256": _digest(figures), "figures": figures}), encoding="utf-8")
        os.replace(aside, path)
    except OSError as error:
        log.warning("the measured figures are not kept for later: %s", error)


def _digest(figures: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(figures, sort_keys=True).encode()).hexdigest()
