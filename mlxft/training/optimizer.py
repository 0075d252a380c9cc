"""MLX's optimisers by name, and the learning rate of each step as a pure function."""

import math
from typing import Any

import mlx.core as mx
import mlx.optimizers as optimizers
from mlx.utils import tree_flatten, tree_map, tree_reduce

from mlxft.config.choices import OPTIMIZERS
from mlxft.config.schema import OptimizerConfig, ScheduleConfig

CLASSES = {
    "adamw": optimizers.AdamW,
    "adam": optimizers.Adam,
    "adamax": optimizers.Adamax,
    "adagrad": optimizers.Adagrad,
    "adadelta": optimizers.AdaDelta,
    "adafactor": optimizers.Adafactor,
    "lion": optimizers.Lion,
    "muon": optimizers.Muon,
    "rmsprop": optimizers.RMSprop,
    "sgd": optimizers.SGD,
}


def build(config: OptimizerConfig) -> optimizers.Optimizer:
    """Returns the optimiser `config.name`, given those of our settings that it has.

    The check of the configuration refuses a setting that the named optimiser does not have, so
    what is left out here stands at its default.
    """
    settings = {name: getattr(config, name) for name in sorted(OPTIMIZERS[config.name])}
    if config.name == "adafactor":
        settings |= {"relative_step": False, "scale_parameter": False}
    return CLASSES[config.name](learning_rate=config.lr, **settings)


def learning_rate(step: int, total_steps: int, peak: float, schedule: ScheduleConfig) -> float:
    """Returns the learning rate of the optimiser step `step`, counted from 0.

    Warm-up: peak (s + 1) / warmup for s < warmup. After it, with p = (s - warmup) / (total - warmup),
    cosine: final + (peak - final) (1 + cos(pi p)) / 2; linear: peak + (final - peak) p; constant: peak.
    Source: the schedules of transformers.optimization, shifted so that the first step already learns.
    """
    warmup, final = schedule.warmup_steps, peak * schedule.final_ratio
    if step < warmup:
        return peak * (step + 1) / warmup
    if schedule.name == "constant":
        return peak
    progress = (step - warmup) / max(total_steps - warmup, 1)
    if schedule.name == "linear":
        return peak + (final - peak) * progress
    return final + (peak - final) * (1 + math.cos(math.pi * progress)) / 2


def global_norm(gradients: Any) -> mx.array:
    """Returns the L2 norm () float32 over all arrays of the tree."""
    squares = tree_reduce(
        lambda total, g: total + mx.square(g.astype(mx.float32)).sum(), gradients, mx.array(0.0)
    )
    return mx.sqrt(squares)


def clip(gradients: Any, norm: mx.array, limit: float) -> Any:
    """Returns the gradients times min(1, limit / (norm + 1e-6)); as they are for limit 0.

    Source: torch.nn.utils.clip_grad_norm_.
    """
    if not limit:
        return gradients
    factor = mx.minimum(limit / (norm + 1e-6), 1.0)
    return tree_map(lambda g: g * factor.astype(g.dtype), gradients)


def state_arrays(optimizer: optimizers.Optimizer) -> dict[str, mx.array]:
    """Returns the optimiser's state by name, ready to be saved."""
    return dict(tree_flatten(optimizer.state))
