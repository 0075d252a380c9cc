"""Makes the gradient function that `trainer.gradient` and its settings ask for."""

from typing import Optional, Union

from mlxft.backend import backend
from mlxft.models.decoder import DecoderView
from mlxft.segmented.gradients import Gradient, Objective, Observer
from mlxft.segmented.plan import GradientPlan
from mlxft.segmented.segments import SegmentedGradient

AnyGradient = Union[Gradient, SegmentedGradient]


def build(
    view: DecoderView,
    objective: Objective,
    plan: GradientPlan,
    repeatable: bool = False,
    observe: Optional[Observer] = None,
) -> AnyGradient:
    """Returns gradient(params, inputs, layout) -> (loss, metrics, gradients), compiled on a GPU."""
    compiled = backend() != "cpu"
    if plan.kind == "segmented":
        return SegmentedGradient(view, objective, plan, compiled, repeatable, observe)
    # Phases cannot be told apart in one program.
    return Gradient(view, objective, plan.kind, compiled and observe is None, repeatable, observe)
