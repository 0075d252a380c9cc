"""Sets up what is trained on a model: low-rank updates of chosen layers, or every weight."""

import logging
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Optional

import mlx.nn as nn
from mlx.utils import tree_flatten

from mlxft.config.choices import ADAPTERS, LOW_RANK_KEYS
from mlxft.config.schema import AdapterConfig
from mlxft.errors import InputError
from mlxft.models.adapters import attach, load_adapter, read_adapter, start_of
from mlxft.models.dequantise import bits_of, is_quantised, num_packed_values
from mlxft.models.fitting import Fitted
from mlxft.models.lora_linear import AdaptedLayer
from mlxft.models.low_rank import fresh
from mlxft.models.mlxlm_adapter import at_one_rank
from mlxft.models.new_rows import make_one
from mlxft.models.new_tokens import new_tokens_of
from mlxft.models.targets import LinearLayer, num_expert_layers, select
from mlxft.models.whole_modules import leaves, select_modules, whole_paths

log = logging.getLogger("mlxft")

DEFAULT_RANK = 8


@dataclass(frozen=True)
class AdapterReport:
    """What is trained. num_trainable, num_total: single values. rank and alpha are None for kind full.

    targets: paths of the adapted layers ("*" for kind full). alpha: the scale times the rank. modules: paths
    of those that are trained whole beside them. expert_layers: how many of the layers are of experts.
    experts: how many they have in all, an update each. ranks: how many layers have which, where they differ;
    `rank` is then the largest, and arrays of smaller ones are filled up with zeros, which stay. new_tokens:
    whose rows are trained.
    """

    num_trainable: int
    num_total: int
    targets: list[str]
    rank: int | None
    alpha: float | None
    kind: str = "lora"
    modules: list[str] = field(default_factory=list)
    expert_layers: int = 0
    experts: int = 0
    rslora: bool = False
    ranks: dict[int, int] = field(default_factory=dict)
    new_tokens: int = 0

    def __str__(self) -> str:
        share = 100 * self.num_trainable / self.num_total
        sizes = f"{self.num_trainable:,} of {self.num_total:,} parameters are trained ({share:.2f}%)"
        rows = f"; rows of new tokens: {self.new_tokens:,}" if self.new_tokens else ""
        if self.rank is None:
            return sizes + rows
        kinds = sorted({path.rpartition(".")[2] for path in self.targets})
        where = f"{len(self.targets)} layers ({', '.join(kinds)})"
        if self.experts:
            where += f", {self.expert_layers} of them of experts, an update for each of {self.experts:,}"
        size = f"scale {self.alpha / self.rank:.4g}" if self.rslora else f"alpha {self.alpha:g}"
        name = {"lora": "rsLoRA" if self.rslora else "LoRA", "dora": "DoRA"}[self.kind]
        whole = f"; whole: {', '.join(self.modules)}" if self.modules else ""
        rank = f"rank {self.rank}"
        if self.ranks:
            each = [f"{rank} ({count} layers)" for rank, count in sorted(self.ranks.items())]
            rank = f"ranks {', '.join(each)}"
            size = f"scale {self.alpha / self.rank:.4g}"
        return f"{sizes}: {name} of {rank}, {size} on {where}{whole}{rows}"


def apply_adapter(
    model: nn.Module, cfg: AdapterConfig, seed: int = 0, lazily: bool = False
) -> AdapterReport:
    """Makes `model` trainable as `cfg` says, in place, and returns what came of it.

    kind lora and dora: everything is frozen, the chosen layers get updates that start at zero, or those of
    `cfg.init_from`; the modules in `cfg.modules_to_save` are trained whole. kind full: every weight is
    trainable. The start depends on `seed` and each layer's path only. lazily: whole weights of
    `cfg.init_from` are not read.

    Raises: InputError for targets, modules or layers that match nothing, settings that contradict
    `cfg.init_from`, and full training of a quantised model.
    """
    if any(isinstance(module, AdaptedLayer) for module in model.modules()):
        raise ValueError("the model has an adapter already")
    if not 0 <= cfg.dropout < 1:
        raise InputError(f"adapter.dropout={cfg.dropout}: expected 0 <= dropout < 1")
    if cfg.kind == "full":
        return _train_everything(model, cfg, lazily)
    if cfg.kind not in ADAPTERS:
        raise InputError(f"adapter.kind={cfg.kind!r}: expected {', '.join(ADAPTERS)}")
    num_base = _num_values(model)
    modules = None if cfg.modules_to_save is None else select_modules(model, _listed(cfg.modules_to_save))
    chosen = _taken_over(model, cfg, modules) if cfg.init_from else _fresh(model, cfg, seed)
    attach(model, chosen, cfg.dropout, modules)
    return _report(model, cfg, chosen, num_base)


def _report(model: nn.Module, cfg: AdapterConfig, chosen: Fitted, num_base: int) -> AdapterReport:
    experts = [layer.module.num_experts for layer, _ in chosen.updates if layer.is_experts]
    if others := num_expert_layers(model) - len(experts):
        log.warning("the model's %d expert layers are not adapted; adapter.targets can name them", others)
    trained = tree_flatten(model.trainable_parameters())
    low_rank = sum(array.size for layer, low in chosen.updates for array in (low.a, low.b))
    lengths = sum(array.size for name, array in trained if cfg.kind == "dora" and name.endswith(".m"))
    first = chosen.updates[0][1]  # rank and scale are the same for all
    return AdapterReport(
        num_trainable=sum(array.size for _, array in trained),
        num_total=num_base + low_rank + lengths,
        targets=[layer.path for layer, _ in chosen.updates],
        rank=first.rank,
        alpha=first.scale * first.rank,
        kind=cfg.kind,
        modules=whole_paths(model),
        expert_layers=len(experts),
        experts=sum(experts),
        rslora=cfg.rslora,
        ranks=_rank_counts(chosen, cfg),
        new_tokens=len(new_tokens_of(model)),
    )


def _rank_counts(chosen: Fitted, cfg: AdapterConfig) -> dict[int, int]:
    """Returns how many layers have which rank; nothing where all are alike, or taken over."""
    if cfg.init_from:
        return {}
    counts = Counter(layer_ranks([layer for layer, _ in chosen.updates], cfg))
    return dict(counts) if len(counts) > 1 else {}


def _fresh(model: nn.Module, cfg: AdapterConfig, seed: int) -> Fitted:
    rank = DEFAULT_RANK if cfg.rank is None else cfg.rank
    alpha = 2 * rank if cfg.alpha is None else cfg.alpha
    if rank < 1:
        raise InputError(f"adapter.rank={rank}: nothing would be trained; expected at least 1")
    if not (alpha > 0 and math.isfinite(alpha)):
        raise InputError(f"adapter.alpha={alpha}: expected a number above 0 (the scale is alpha / rank)")
    scale = alpha / (math.sqrt(rank) if cfg.rslora else rank)
    layers = select(model, cfg.targets, cfg.layers)
    ranks = layer_ranks(layers, cfg)
    most = max(ranks)
    updates = [
        (layer, fresh(layer, own, scale, seed).widened(most, scale))
        for layer, own in zip(layers, ranks, strict=True)
    ]
    return Fitted(Path(), cfg.kind, updates)


def layer_ranks(layers: Sequence[LinearLayer], cfg: AdapterConfig) -> list[int]:
    """Returns each layer's rank: what `cfg.ranks` says of it, else `cfg.rank` as `cfg.rank_by` changes it.

    Raises: InputError for a name in `cfg.ranks` that matches none of the layers, and for ranks by bits of a
    model whose layers all have the same.
    """
    rank = DEFAULT_RANK if cfg.rank is None else cfg.rank
    for pattern in cfg.ranks:
        if not any(_named(pattern, layer) for layer in layers):
            there = ", ".join(sorted({layer.name for layer in layers}))
            raise InputError(f"adapter.ranks: {pattern!r} matches none of the adapted layers: {there}")
    bits = [bits_of(layer.module) for layer in layers]
    if cfg.rank_by == "bits" and len(set(bits)) == 1:
        raise InputError(
            f"adapter.rank_by=bits: all adapted layers have {bits[0]} bits, so nothing tells their ranks "
            "apart. Leave it out, or give ranks yourself: adapter.ranks={q_proj:16}"
        )
    ranks = []
    for layer, own_bits in zip(layers, bits, strict=True):
        own = max(2, math.ceil(rank * own_bits / 4)) if cfg.rank_by == "bits" else rank
        given = [number for pattern, number in cfg.ranks.items() if _named(pattern, layer)]
        ranks.append(given[-1] if given else own)
    return ranks


def _named(pattern: str, layer: LinearLayer) -> bool:
    last = layer.name.rpartition(".")[2]
    return any(fnmatchcase(name, pattern) for name in (last, layer.name, layer.path))


def _taken_over(model: nn.Module, cfg: AdapterConfig, modules: Optional[list[str]]) -> Fitted:
    """Returns the updates of `cfg.init_from`, at one rank and scale: what is trained is what is saved."""
    fitted = start_of(model, cfg.init_from, cfg.init_weights)
    if fitted.kind != cfg.kind:
        raise InputError(f"adapter.kind={cfg.kind} contradicts adapter.init_from={cfg.init_from}, which is "
                         f"of kind {fitted.kind}; use adapter.kind={fitted.kind}")
    _check_agrees(cfg, fitted)
    if modules is not None and leaves(model, modules) != fitted.modules:
        raise InputError(f"adapter.modules_to_save chooses {', '.join(modules)} and contradicts adapter."
                         f"init_from={cfg.init_from}, which has {', '.join(fitted.modules) or 'no'} whole "
                         "modules. Leave it out to take over the adapter's.")
    if cfg.targets is not None or cfg.layers != "all":
        wanted = {layer.path for layer in select(model, cfg.targets, cfg.layers)}
        found = {layer.path for layer, _ in fitted.updates}
        if wanted != found:
            raise InputError(
                f"adapter.targets={cfg.targets} and adapter.layers={cfg.layers!r} contradict "
                f"adapter.init_from={cfg.init_from}: they choose {len(wanted)} layers, the adapter has "
                f"{len(found)}, {len(wanted ^ found)} differ, first {min(wanted ^ found)}. Leave both out to "
                "take over the adapter's.")
    even = at_one_rank({layer.path: low for layer, low in fitted.updates})
    return replace(fitted, updates=[(layer, even[layer.path]) for layer, _ in fitted.updates])


def _listed(names: str | list[str]) -> list[str]:
    return [names] if isinstance(names, str) else list(names)


def _check_agrees(cfg: AdapterConfig, fitted: Fitted) -> None:
    """Raises InputError if an explicit rank or alpha is not what the adapter in init_from has."""
    for layer, low in fitted.updates:
        path = layer.path
        given = {"rank": (cfg.rank, low.rank), "alpha": (cfg.alpha, low.scale * low.rank)}
        for key, (ours, theirs) in given.items():
            if ours is not None and not math.isclose(ours, theirs, rel_tol=1e-6):
                raise InputError(f"adapter.{key}={ours} contradicts adapter.init_from={cfg.init_from}: there "
                                 f"{path} has {key} {theirs:g}. Leave adapter.{key} out to take it over.")


def _train_everything(model: nn.Module, cfg: AdapterConfig, lazily: bool) -> AdapterReport:
    default = AdapterConfig()
    for key in LOW_RANK_KEYS:
        if getattr(cfg, key) != getattr(default, key):
            raise InputError(f"adapter.{key} has no meaning for adapter.kind=full, which trains every weight")
    quantised = [path for path, module in model.named_modules() if is_quantised(module)]
    if quantised:
        raise InputError(f"adapter.kind=full cannot train quantised weights ({len(quantised)} layers, first "
                         f"{min(quantised)}); use adapter.kind=lora, or a model that is not quantised")
    if cfg.init_from:
        if not isinstance(cfg.init_from, str):
            raise InputError(f"adapter.init_from={cfg.init_from}: only LoRA adapters can be added up")
        if (kind := read_adapter(cfg.init_from).kind) != "full":
            raise InputError(f"adapter.kind=full contradicts adapter.init_from={cfg.init_from}, which is an "
                             f"adapter of kind {kind}; use adapter.kind={kind}")
        load_adapter(model, cfg.init_from, lazily=lazily)
    else:
        make_one(model)
    model.unfreeze()
    total = _num_values(model)
    return AdapterReport(total, total, ["*"], None, None, new_tokens=len(new_tokens_of(model)))


def _num_values(model: nn.Module) -> int:
    """Returns how many weights the model has, packed ones counted as what they stand for."""
    total = sum(array.size for _, array in tree_flatten(model.parameters()))
    for module in model.modules():
        if is_quantised(module):
            packed = [module[name].size for name in ("weight", "scales", "biases") if name in module]
            total += num_packed_values(module) - sum(packed)
    return total
