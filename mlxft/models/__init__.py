"""Models: where they come from, how they are loaded and checked, and what is trained on top of them."""

# load.py imports nothing heavy itself. It is imported here, before anything else can be: importing it
# later would put the module in the place of the function.
from mlxft.models.load import load

__all__ = ["load"]
