"""What the linear layers of one decoder layer are given when a model reads rows: its second moments."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Optional

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_unflatten

from mlxft.layouts.cache import TrainingCache
from mlxft.layouts.pieces import padded
from mlxft.models.decoder import DecoderView, State
from mlxft.models.trellis.rotation import rotated


class RowsOnTheirWay:
    """Rows of tokens between two decoder layers, each as the state the model has of it there."""

    def __init__(self, view: DecoderView, rows: Sequence[np.ndarray]):
        self.view = view
        with view.active():
            self._states: list[State] = [view.embed(mx.array(row[None])) for row in rows]
        mx.eval(self._states)

    def moments(self, index: int, names: Sequence[str], seed: Optional[int]) -> dict[str, np.ndarray]:
        """Returns E[x x^T] (width, width) float64 of the inputs of the named linear layers of layer `index`.

        seed: of the rotation that the inputs are in, None for none.
        """
        sums = {name: np.zeros(()) for name in names}
        given: dict[str, mx.array] = {}
        with _recorded(self.view.layers[index], names, given):
            for state in self._states:
                mx.eval(self._after(index, state), given)
                for name, x in given.items():
                    turned = x if seed is None else rotated(x, seed)
                    sums[name] = sums[name] + np.array(turned.T @ turned, np.float64)
        count = sum(state[0].shape[1] for state in self._states)
        # Made symmetric: a product's two halves are rounded apart, which large inputs make more than damping.
        return {name: (total + total.T) / (2 * count) for name, total in sums.items()}

    def advance(self, index: int) -> None:
        """Takes the rows through layer `index` as it is now."""
        for place, state in enumerate(self._states):
            self._states[place] = self._after(index, state)
            mx.eval(self._states[place])

    def _after(self, index: int, state: State) -> State:
        with self.view.active():
            cache = TrainingCache(padded(state[0].shape[1]))
            return self.view.run(state, index, index + 1, cache)


class _Recorder(nn.Module):
    """A linear layer that notes what it is given, (T, width) float32."""

    def __init__(self, linear: nn.Module, note: Callable[[mx.array], None]):
        super().__init__()
        self.linear = linear
        self._note = note

    def __call__(self, x: mx.array) -> mx.array:
        self._note(x.reshape(-1, x.shape[-1]).astype(mx.float32))
        return self.linear(x)


@contextmanager
def _recorded(layer: nn.Module, names: Sequence[str], given: dict[str, mx.array]) -> Iterator[None]:
    """Within the block the named linear layers of `layer` put what they are given into `given`."""
    modules = dict(layer.named_modules())
    originals = [(name, modules[name]) for name in names]
    recorders = [(name, _Recorder(linear, partial(given.__setitem__, name))) for name, linear in originals]
    layer.update_modules(tree_unflatten(recorders))
    try:
        yield
    finally:
        layer.update_modules(tree_unflatten(originals))
