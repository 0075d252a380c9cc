"""The figures that predictions stand on: measured once a machine, library version and shape, and kept."""

import hashlib
import json
import logging
import math
import os
import platform
import time
from collections.abc import Callable, Sequence
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
# Of heads: the fewest tokens, and the larger vocabulary over the hidden width. Logits have to be what takes
# most memory, as they do in real ones.
_HEAD_TOKENS, _HEAD_RATIO = 16, 32
_SMALLEST_VOCABULARY = 1000
# Of logits. A CPU is done with smaller ones before MLX has begun the next: fewer of them are alive at once.
_HEAD_BYTES = 2**20
_HEAD_REPEATS = 3  # how far MLX is ahead varies by an array: the largest peak counts
# Of a trained head, or its gradient would hide what few logits take. The rest is in proportion to the width.
_TRAINED_WIDTH = 64
_MOST_CHUNKS = 4  # of the head: a backend that runs ahead has a few of them alive, not more


@dataclass(frozen=True)
class Calibration:
    """What probes measured, for `rows` rows of each of two `lengths`.

    layers: those that were probed of each group. kept: by kind and length, bytes that one layer of each
    group adds to a step's peak. working: by kind and length, bytes beside those. joined: by length, those of
    one segment of all `layers`. seconds: by kind and length, of a step of these. Where any layer has
    halves, HALVES is such a kind, and of_half has, by half and length, the bytes that the backward of one
    takes, of all positions at once, and what a step has "beside" the larger one. head: by kind, for 1 chunk,
    2, and so on to the most that make a difference, bytes a logit at once, a supervised token, a token of the
    vocabulary; a trained head's gradient is among them. head_seconds: of a logit, over the hidden width.
    update: bytes that an optimiser's update of a few layers takes beside what was there; of many it takes no
    more, array by array.
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
            if kind == "whole":
                added = [self._added(group, length, cost) for group in groups]
            else:
                added = [float(entering * group.is_walked) for group in groups]
            own = sum(each * _number_in(group, self.base) for each, group in zip(added, groups, strict=True))
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

    def _plan(self, kind: str) -> GradientPlan:
        if kind == HALVES:
            return GradientPlan("segmented", 1, self.in_flight, halves=True)
        return GradientPlan(kind, 1, self.in_flight)

    def _step(self, indices: Sequence[int], plan: GradientPlan, length: int) -> tuple[Cost, float]:
        self.model.choose(indices)
        repeat = 1 if backend() == "cpu" else 3  # a GPU compiles first
        return self.model.step(plan, self.rows, length, repeat)

    def _added(self, group: LayerGroup, length: int, cost: Cost) -> float:
        """Returns the bytes that one more layer of a group adds to a whole step; 0 for one with all."""
        more = next((index for index in group.indices if index not in self.base), None)
        if more is None:
            return 0.0
        self.model.choose([*self.base, more])
        larger, _ = self.model.step(self._plan("whole"), self.rows, length)
        return max(larger.num_bytes - cost.num_bytes, 0.0)

    def _head(self) -> tuple[dict[str, list[list[float]]], float]:
        """Returns what `Calibration.head` says, and the seconds of a product."""
        shape, model = self.shape, self.model
        is_whole = shape.trained_head_bytes >= shape.vocabulary * shape.width * shape.item_bytes
        model.freeze_all_but_head()
        width = min(shape.width, _TRAINED_WIDTH) if is_whole else shape.width
        many = max(min(shape.vocabulary, _HEAD_RATIO * width), _SMALLEST_VOCABULARY)
        few, many = model.unlike_any_axis(many // 2), model.unlike_any_axis(many)
        small = max(_HEAD_TOKENS, -(-_HEAD_BYTES // (4 * few)))
        sizes = (few, small), (few, 2 * small), (many, small)
        costs: dict[str, list[list[float]]] = {"whole": [], "segmented": []}
        for vocabulary, tokens in sizes:
            model.cut(vocabulary, width)
            costs["whole"].append([_most(model.head, tokens, n) for n in range(1, _MOST_CHUNKS + 1)])
            # Which waits for each chunk: more of them take no more.
            costs["segmented"].append([_most(model.segmented_head, tokens, n) for n in (1, 2)])
        figures = {
            kind: [
                _head_figures(sizes, by_size, chunks, shape.width / width)
                for chunks, by_size in enumerate(zip(*of_kind, strict=True), 1)
            ]
            for kind, of_kind in costs.items()
        }
        shape.view.head_module.freeze()
        model.cut(few, shape.width)
        seconds = min(model.head(small * _MOST_CHUNKS, small).seconds for _ in range(_HEAD_REPEATS))
        return figures, seconds / (small * _MOST_CHUNKS * few * shape.width)


def _most(head: Callable[[int, Optional[int]], Cost], tokens: int, chunks: int) -> float:
    """Returns the most bytes that a head took, of several times."""
    return max(head(tokens * chunks, tokens if chunks > 1 else None).num_bytes for _ in range(_HEAD_REPEATS))


def _head_figures(
    sizes: Sequence[tuple[int, int]], costs: Sequence[float], chunks: int, wider: float
) -> list[float]:
    """Returns one of `Calibration.head` from costs of (vocabulary, tokens of a chunk): few and small, the
    same with more tokens, the same with more words. wider: how much the model is than what was measured.

        bytes = logit x tokens x vocabulary + token x tokens x chunks + word x vocabulary
    """
    (few, small), (_, large), (many, _) = sizes
    one, with_tokens, with_words = costs
    by_token, by_word = (with_tokens - one) / (large - small), (with_words - one) / (many - few)
    logit = (by_token * small + by_word * few - one) / (small * few)
    # Of one more array alive by chance the difference makes several.
    every = (cost / (tokens * vocabulary) for (vocabulary, tokens), cost in zip(sizes, costs, strict=True))
    logit = min(logit, *every)
    token, word = (by_token - logit * few) / chunks, by_word - logit * small
    return [logit, wider * max(token, 0.0), wider * max(word, 0.0)]


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
