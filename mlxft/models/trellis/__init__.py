"""Trellis-quantised weights: 2, 3 or 4 bits a weight, read as a path through a code that is computed.

Of the family of "QTIP: Quantization with Trellises and Incoherence Processing" (arXiv:2406.11235), with its
code 1MAD and a ring of 12-bit states. `format` says what the bits mean, `encode` finds them, `linear` has the
layer, `rotation` what is done to weights and activations before.
"""

from mlxft.models.trellis.encode import quantize
from mlxft.models.trellis.format import dequantize

__all__ = ["dequantize", "quantize"]
