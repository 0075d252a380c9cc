"""A run's configuration: `compose` from a command line, `from_dict` from Python, both fully checked."""

from mlxft.config.composition import Composed, compose, from_dict, to_yaml
from mlxft.config.schema import Config, GenerateConfig

__all__ = ["Composed", "Config", "GenerateConfig", "compose", "from_dict", "to_yaml"]
