"""Sets up what is trained on a model: low-rank updates of chosen layers, or every weight."""

import logging
import math
from dataclasses import dataclass

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from mlxft.config.schema import AdapterConfig
from mlxft.errors import InputError
from mlxft.models.adapter_tensors import Adapter, LowRank
from mlxft.models.adapters import attach, fit, load_adapter, read_adapter
from mlxft.models.dequantise import is_quantised, num_packed_values
from mlxft.models.frozen_linear import dimensions
from mlxft.models.lora_linear import LoRALinear, initial_a
from mlxft.models.mlxlm_adapter import at_one_rank
from mlxft.models.targets import LinearLayer, num_expert_layers, select

log = logging.getLogger("mlxft")

DEFAULT_RANK = 8


@dataclass(frozen=True)
class AdapterReport:
    """What is trained. num_trainable, num_total: single values. rank and alpha are None for kind full.

    targets: paths of the adapted layers ("*" for kind full).
    """

    num_trainable: int
    num_total: int
    targets: list[str]
    rank: int | None
    alpha: float | None

    def __str__(self) -> str:
        share = 100 * self.num_trainable / self.num_total
        sizes = f"{self.num_trainable:,} of {self.num_total:,} parameters are trained ({share:.2f}%)"
        if self.rank is None:
            return sizes
        kinds = sorted({path.rpartition(".")[2] for path in self.targets})
        where = f"{len(self.targets)} layers ({', '.join(kinds)})"
        return f"{sizes}: LoRA of rank {self.rank}, alpha {self.alpha:g} on {where}"


def apply_adapter(model: nn.Module, cfg: AdapterConfig, seed: int = 0) -> AdapterReport:
    """Makes `model` trainable as `cfg` says, in place, and returns what came of it.

    kind lora: everything is frozen, the chosen linear layers get updates that start at zero, or those
    of `cfg.init_from`. kind full: every weight is trainable. The start depends on `seed` and each
    layer's path only.

    Raises: InputError for targets or layers that match nothing, settings that contradict
    `cfg.init_from`, and full training of a quantised model.
    """
    if any(isinstance(module, LoRALinear) for module in model.modules()):
        raise ValueError("the model has an adapter already")
    if not 0 <= cfg.dropout < 1:
        raise InputError(f"adapter.dropout={cfg.dropout}: expected 0 <= dropout < 1")
    if cfg.kind == "full":
        return _train_everything(model, cfg)
    if cfg.kind != "lora":
        raise InputError(f"adapter.kind={cfg.kind!r}: expected lora or full")
    num_base = _num_values(model)
    chosen = _taken_over(model, cfg) if cfg.init_from else _fresh(model, cfg, seed)
    attach(model, chosen, cfg.dropout)
    if num_experts := num_expert_layers(model):
        log.warning("the model's %d expert layers are not adapted, only its linear layers are", num_experts)
    num_trainable = sum(array.size for _, array in tree_flatten(model.trainable_parameters()))
    rank, scale = chosen[0][1].rank, chosen[0][1].scale  # the same for all
    return AdapterReport(num_trainable, num_base + num_trainable, [layer.path for layer, _ in chosen],
                         rank, scale * rank)


def _fresh(model: nn.Module, cfg: AdapterConfig, seed: int) -> list[tuple[LinearLayer, LowRank]]:
    rank = DEFAULT_RANK if cfg.rank is None else cfg.rank
    alpha = 2 * rank if cfg.alpha is None else cfg.alpha
    if rank < 1:
        raise InputError(f"adapter.rank={rank}: nothing would be trained; expected at least 1")
    if not (alpha > 0 and math.isfinite(alpha)):
        raise InputError(f"adapter.alpha={alpha}: expected a number above 0 (the scale is alpha / rank)")
    updates = []
    for layer in select(model, cfg.targets, cfg.layers):
        inputs, outputs = dimensions(layer.module)
        a, b = initial_a(seed, layer.path, inputs, rank), mx.zeros((rank, outputs))
        updates.append((layer, LowRank(a, b, alpha / rank)))
    return updates


def _taken_over(model: nn.Module, cfg: AdapterConfig) -> list[tuple[LinearLayer, LowRank]]:
    """Returns the updates of `cfg.init_from`, at one rank and scale: what is trained is what is saved."""
    adapter = read_adapter(cfg.init_from)
    if adapter.kind != "lora":
        raise InputError(f"adapter.kind=lora contradicts adapter.init_from={cfg.init_from}, which holds "
                         "whole weights; use adapter.kind=full")
    _check_agrees(cfg, adapter)
    fitted = fit(adapter, model)
    if cfg.targets is not None or cfg.layers != "all":
        wanted = {layer.path for layer in select(model, cfg.targets, cfg.layers)}
        found = {layer.path for layer, _ in fitted}
        if wanted != found:
            raise InputError(
                f"adapter.targets={cfg.targets} and adapter.layers={cfg.layers!r} contradict "
                f"adapter.init_from={cfg.init_from}: they choose {len(wanted)} layers, the adapter has "
                f"{len(found)}, {len(wanted ^ found)} differ, first {min(wanted ^ found)}. Leave both out to "
                "take over the adapter's.")
    even = at_one_rank({layer.path: low for layer, low in fitted})
    return [(layer, even[layer.path]) for layer, _ in fitted]


def _check_agrees(cfg: AdapterConfig, adapter: Adapter) -> None:
    """Raises InputError if an explicit rank or alpha is not what the adapter in init_from has."""
    for path, low in adapter.layers.items():
        given = {"rank": (cfg.rank, low.rank), "alpha": (cfg.alpha, low.scale * low.rank)}
        for key, (ours, theirs) in given.items():
            if ours is not None and not math.isclose(ours, theirs, rel_tol=1e-6):
                raise InputError(f"adapter.{key}={ours} contradicts adapter.init_from={cfg.init_from}: there "
                                 f"{path} has {key} {theirs:g}. Leave adapter.{key} out to take it over.")


def _train_everything(model: nn.Module, cfg: AdapterConfig) -> AdapterReport:
    for key in ("rank", "alpha", "targets"):
        if getattr(cfg, key) is not None:
            raise InputError(f"adapter.{key} has no meaning for adapter.kind=full, which trains every weight")
    if cfg.layers != "all" or cfg.dropout:
        key = "layers" if cfg.layers != "all" else "dropout"
        raise InputError(f"adapter.{key} has no meaning for adapter.kind=full, which trains every weight")
    quantised = [path for path, module in model.named_modules() if is_quantised(module)]
    if quantised:
        raise InputError(f"adapter.kind=full cannot train quantised weights ({len(quantised)} layers, first "
                         f"{min(quantised)}); use adapter.kind=lora, or a model that is not quantised")
    if cfg.init_from:
        if read_adapter(cfg.init_from).kind != "full":
            raise InputError(f"adapter.kind=full contradicts adapter.init_from={cfg.init_from}, which holds "
                             "a LoRA adapter; use adapter.kind=lora")
        load_adapter(model, cfg.init_from)
    model.unfreeze()
    total = _num_values(model)
    return AdapterReport(total, total, ["*"], None, None)


def _num_values(model: nn.Module) -> int:
    """Returns how many weights the model has, packed ones counted as what they stand for."""
    total = sum(array.size for _, array in tree_flatten(model.parameters()))
    for module in model.modules():
        if is_quantised(module):
            packed = [module[name].size for name in ("weight", "scales", "biases") if name in module]
            total += num_packed_values(module) - sum(packed)
    return total
