"""Objectives as the loop sees them: what to count, what to feed the forward, what the loss is."""

from typing import Any

from mlxft.layouts.arrange import Arranger
from mlxft.training.objectives.common import HeadPlan, Objective
from mlxft.training.objectives.sft import Sft

OBJECTIVES = {"sft": Sft}


def build(config: Any, multiple: int) -> Objective:
    """Returns the objective, head and layout that the configuration names. multiple: see `Arranger`."""
    plan = HeadPlan(config.head.kind, config.head.chunk)
    return OBJECTIVES[config.trainer.objective](plan, Arranger(config.trainer.layout, multiple))
