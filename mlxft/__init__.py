"""mlxft: fine-tuning on MLX, on Apple silicon, NVIDIA GPUs and plain CPUs."""

from mlxft.blas import preload

__version__ = "0.1.0"

preload()  # before anything imports mlx.core: MLX binds to the BLAS that it finds first
