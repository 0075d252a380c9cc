"""Objectives as the loop sees them: what to count, what to feed the forward, what the loss is."""

from typing import Any, Optional

from mlxft.layouts.arrange import Arranger
from mlxft.training.objectives.common import HeadPlan, Objective, Reference
from mlxft.training.objectives.preference import Cpo, Dpo, LossSettings, Orpo, PairObjective, Simpo
from mlxft.training.objectives.sft import Sft
from mlxft.training.objectives.unpaired import Kto, KtoSettings

__all__ = ["Cpo", "Dpo", "HeadPlan", "Kto", "Objective", "Orpo", "PairObjective", "Sft", "Simpo", "build"]

PAIRS = {"dpo": Dpo, "orpo": Orpo, "cpo": Cpo, "simpo": Simpo}
_BETA, _SIMPO_BETA, _GAMMA = 0.1, 2.0, 0.5  # where the configuration names none


def build(config: Any, arranger: Arranger, reference: Optional[Reference] = None) -> Objective:
    """Returns the objective that the configuration names, its rows forwarded as `arranger` says.

    reference: for dpo and kto.
    """
    objective, loss = config.trainer.objective, config.loss
    plan = HeadPlan(config.head.kind, config.head.chunk)
    if objective == "sft":
        return Sft(plan, arranger)
    beta = loss.beta or (_SIMPO_BETA if objective == "simpo" else _BETA)
    if objective == "kto":
        settings = KtoSettings(beta, loss.desirable_weight, loss.undesirable_weight)
        return Kto(plan, arranger, settings, reference)
    default_weight = 1.0 if objective in ("orpo", "cpo") else 0.0
    return PAIRS[objective](
        plan,
        arranger,
        LossSettings(
            beta=beta,
            variant=loss.variant,
            label_smoothing=loss.label_smoothing,
            gamma=_GAMMA if loss.gamma is None else loss.gamma,
            nll_weight=default_weight if loss.nll_weight is None else loss.nll_weight,
            nll_scope=loss.nll_scope if objective == "orpo" else "response",
        ),
        reference,
    )
