"""What a test may expect of the device it runs on."""

import mlx.core as mx
import pytest

ON_CPU = mx.default_device().type == mx.DeviceType.cpu
CLOSE = 1e-5  # float32, sums in another order: of the largest entry
SLACK = 1 if ON_CPU else 10  # a GPU's float32 sums differ more: times a CPU's tolerance

cpu_figures = pytest.mark.skipif(not ON_CPU, reason="the figures are the CPU backend's")
