"""MLX's optimisers by name, and the learning rate of each step as a pure function."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Optional

import mlx.core as mx
import mlx.optimizers as optimizers
from mlx.utils import tree_flatten, tree_map, tree_reduce

from mlxft.config.choices import OPTIMIZERS, wsd_decay_steps
from mlxft.config.schema import OptimizerConfig, ScheduleConfig
from mlxft.errors import InputError

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


@dataclass(frozen=True)
class Group:
    """How arrays of one group differ from the others. rate: their learning rate over optimizer.lr."""

    rate: float = 1.0
    decays: bool = True


Grouping = Callable[[str, mx.array], Group]  # of an array's name and the array


def grouping(config: OptimizerConfig) -> Optional[Grouping]:
    """Returns which group an array is of, None where all are of one.

    LoRA+: an adapter's B learns lora_plus_ratio times as fast as all else (Hayou et al. 2024, "LoRA+").
    Without decay_vectors whatever is no matrix (norms, biases, magnitudes) has no weight decay.
    """
    if config.lora_plus_ratio == 1 and config.decay_vectors:
        return None

    def group(name: str, array: mx.array) -> Group:
        rate = config.lora_plus_ratio if name.endswith("lora_b") else 1.0
        return Group(rate, config.decay_vectors or array.ndim > 1)

    return group


def learning_rate(step: int, total_steps: int, peak: float, schedule: ScheduleConfig) -> float:
    """Returns the learning rate of the optimiser step `step`, counted from 0.

    Warm-up: peak (s + 1) / warmup for s < warmup. After it, with p = (s - warmup) / (total - warmup),
    cosine: final + (peak - final) (1 + cos(pi p)) / 2; linear: peak + (final - peak) p; constant: peak;
    wsd: peak until the last decay steps, then linear over them.
    Source: the schedules of transformers.optimization, shifted so that the first step already learns; Hu et
    al. 2024, "MiniCPM", section 4.2, with a line for its decay.
    """
    warmup, final = schedule.warmup_steps, peak * schedule.final_ratio
    if step < warmup:
        return peak * (step + 1) / warmup
    if schedule.name == "constant":
        return peak
    if schedule.name == "wsd":
        falling = wsd_decay_steps(total_steps, schedule.decay_share)
        return peak + (final - peak) * max(0, step - (total_steps - falling)) / falling
    progress = (step - warmup) / max(total_steps - warmup, 1)
    if schedule.name == "linear":
        return peak + (final - peak) * progress
    return final + (peak - final) * (1 + math.cos(math.pi * progress)) / 2


def check_schedule(schedule: ScheduleConfig, total_steps: int) -> None:
    """Raises InputError if the warm-up leaves a run of so many steps none at the highest rate."""
    warmup = schedule.warmup_steps
    if warmup >= total_steps:
        raise InputError(
            f"schedule.warmup_steps={warmup} are not fewer than the run's {total_steps} steps: the learning "
            "rate would never be optimizer.lr. Give fewer, or more trainer.epochs"
        )
    falling = wsd_decay_steps(total_steps, schedule.decay_share)
    if schedule.name == "wsd" and warmup + falling > total_steps:
        raise InputError(
            f"schedule.warmup_steps={warmup} and the {falling} last steps that schedule.decay_share="
            f"{schedule.decay_share:g} falls in are more than the run's {total_steps}. Give fewer of either"
        )


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
