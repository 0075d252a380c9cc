"""Makes the gradient function that `trainer.gradient` and its settings ask for."""

from dataclasses import dataclass
from typing import Optional, Union

from mlxft.backend import backend
from mlxft.models.decoder import DecoderView
from mlxft.segmented.gradients import Gradient, Objective, Observer
from mlxft.segmented.segments import SegmentedGradient

AnyGradient = Union[Gradient, SegmentedGradient]


@dataclass(frozen=True)
class GradientPlan:
    """How a backward is run. kind: whole, checkpoint or segmented, to which the rest belongs.

    segment_layers: layers of a segment. in_flight: segments submitted before one is waited for. halves:
    each layer's attention and MLP apart.
    """

    kind: str = "whole"
    segment_layers: int = 1
    in_flight: int = 1
    halves: bool = False

    def __str__(self) -> str:
        if self.kind != "segmented":
            return self.kind
        if self.halves:
            return "segmented, half a layer a segment"
        layers = "1 layer" if self.segment_layers == 1 else f"{self.segment_layers} layers"
        return f"segmented, {layers} a segment"


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
        how = plan.segment_layers, plan.in_flight, compiled, repeatable, observe, plan.halves
        return SegmentedGradient(view, objective, *how)
    # Phases cannot be told apart in one program.
    return Gradient(view, objective, plan.kind, compiled and observe is None, repeatable, observe)
