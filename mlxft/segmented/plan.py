"""How a backward is run, as a value: chosen by the planner, kept in checkpoints, read by `build`."""

from dataclasses import dataclass


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
