"""mlxft: fine-tuning on MLX, on Apple silicon, NVIDIA GPUs and plain CPUs."""

from mlxft.blas import preload

__version__ = "0.1.0"

preload()  # before anything imports mlx.core: MLX binds to the BLAS that it finds first


def train(config):
    """Trains a run and returns its `RunResult`: the folder, the adapter, the status and the losses.

    config: a dictionary ({"model": {"path": ...}, "data": {"train": ...}} or with dotted keys), a
    `mlxft.config.Config`, or a list of what `mlxft train` takes: ["+recipe=quickstart", "optimizer.lr=1e-4"].

    Raises: mlxft.errors.InputError for wrong input, GuardStop and Interrupted for a run that ended early.
    """
    from mlxft.config import Composed, compose, from_dict

    composed = compose(config) if isinstance(config, list | tuple) else Composed(from_dict(config))
    from mlxft.training.run import train as run

    return run(composed)
