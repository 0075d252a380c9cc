"""Which of MLX's backends computes, for the few places where that changes what is fastest."""

import mlx.core as mx


def backend() -> str:
    """Returns "cpu", "metal" or "cuda": where arrays are computed by default."""
    if mx.default_device().type == mx.DeviceType.cpu:
        return "cpu"
    return "metal" if mx.metal.is_available() else "cuda"


def shape_multiple() -> int:
    """Returns what lengths are rounded up to: a GPU compiles a program for each new one, a CPU none."""
    return 1 if backend() == "cpu" else 128
