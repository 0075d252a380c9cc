"""mlxft: fine-tuning on MLX, on Apple silicon, NVIDIA GPUs and plain CPUs."""

__version__ = "0.1.0"
