"""What a window's gradients make of the weights: clipped, then the optimiser's step.

Compiled, the update is given ahead, before anybody knows whether loss and gradients are finite: where they
are not it leaves weights and state as they are.
"""

import math
from collections.abc import Callable
from copy import copy
from itertools import accumulate
from typing import Any, Optional, Union

import mlx.core as mx
import mlx.optimizers as optimizers
from mlx.utils import tree_flatten, tree_map, tree_unflatten

from mlxft.training.optimizer import Group, Grouping, clip, global_norm, state_arrays

# Optimisers that treat each number of an array by itself, whatever array it is in.
_BY_NUMBER = (
    optimizers.AdaDelta,
    optimizers.Adagrad,
    optimizers.Adam,
    optimizers.Adamax,
    optimizers.Lion,
    optimizers.RMSprop,
    optimizers.SGD,
)
_FEW_NUMBERS = 2**26  # what is copied for being put end to end is no more than 256 MB of float32
_ALL = "all"


Update = Union["ArrayByArray", "EndToEnd", "InGroups"]


def make_update(
    optimizer: optimizers.Optimizer,
    clip_norm: float,
    params: Any,
    compiled: bool,
    group_of: Optional[Grouping] = None,
) -> Update:
    """Returns the update of the trainable arrays `params`, a tree; optimizer: with its state as it is now."""
    if group_of is not None:
        return InGroups(optimizer, clip_norm, params, compiled, group_of)
    arrays = [array for _, array in tree_flatten(params)]
    few = sum(array.size for array in arrays) <= _FEW_NUMBERS and len({array.dtype for array in arrays}) == 1
    if compiled and few and isinstance(optimizer, _BY_NUMBER):
        return EndToEnd(optimizer, clip_norm, params)
    return ArrayByArray(optimizer, clip_norm, compiled)


class ArrayByArray:
    """One array after the other, by any optimiser.

    gathered(gradients) -> (gradients, norm); (params, gradients, loss, norm, learning rate) -> params.
    """

    def __init__(self, optimizer: optimizers.Optimizer, clip_norm: float, compiled: bool):
        self.optimizer = optimizer
        self.gathered: Callable = lambda gradients: (gradients, global_norm(gradients))
        self._update = _clipped(optimizer, clip_norm)
        if compiled:
            self.gathered = mx.compile(self.gathered)
            self._update = _compiled(_guarded(optimizer, self._update), optimizer)

    def __call__(self, params: Any, gradients: Any, loss: mx.array, norm: mx.array, rate: float) -> Any:
        self.optimizer.learning_rate = rate
        return self._update(params, gradients, loss, norm)

    def held(self) -> Any:
        """Returns what is kept from step to step, as it is kept, to be evaluated."""
        return self.optimizer.state

    def state(self) -> dict[str, mx.array]:
        """Returns the optimiser's state by name."""
        return state_arrays(self.optimizer)


class EndToEnd:
    """All arrays as one: hundreds of small ones cost a GPU more to launch than to compute.

    The numbers, and the state under its names, are those of `ArrayByArray`.
    """

    def __init__(self, optimizer: optimizers.Optimizer, clip_norm: float, params: Any):
        self.names = [name for name, _ in tree_flatten(params)]
        self.shapes = [array.shape for _, array in tree_flatten(params)]
        own, first = state_arrays(optimizer), f"{self.names[0]}."
        kinds = sorted(key.removeprefix(first) for key in own if key.startswith(first))
        self.optimizer = copy(optimizer)
        self.optimizer.state = {key: array for key, array in own.items() if "." not in key} | {
            _ALL: {kind: _end_to_end([own[f"{name}.{kind}"] for name in self.names]) for kind in kinds}
        }
        self._parts: list[mx.array] = []  # what the weights in one piece were last cut into
        self._weights = mx.array([])
        self._gathered = mx.compile(self._gather)
        update = _guarded(self.optimizer, _clipped(self.optimizer, clip_norm))
        self._update = _compiled(update, self.optimizer)

    def gathered(self, gradients: Any) -> tuple[mx.array, mx.array]:
        """Returns the gradients in one piece, and their norm."""
        return self._gathered([array for _, array in tree_flatten(gradients)])

    def _gather(self, arrays: list[mx.array]) -> tuple[mx.array, mx.array]:
        together = _end_to_end(arrays)
        return together, global_norm([together])

    def __call__(self, params: Any, gradients: mx.array, loss: mx.array, norm: mx.array, rate: float) -> Any:
        arrays = [array for _, array in tree_flatten(params)]
        if [id(array) for array in arrays] != [id(part) for part in self._parts]:
            self._weights = _end_to_end(arrays)
        self.optimizer.learning_rate = rate
        (self._weights,) = self._update({_ALL: self._weights}, {_ALL: gradients}, loss, norm).values()
        self._parts = self._cut(self._weights)
        parts = iter(self._parts)
        return tree_map(lambda _: next(parts), params)

    def _cut(self, together: mx.array) -> list[mx.array]:
        sizes = accumulate(math.prod(shape) for shape in self.shapes)
        parts = mx.split(together, list(sizes)[:-1])
        return [part.reshape(shape) for part, shape in zip(parts, self.shapes, strict=True)]

    def held(self) -> Any:
        """Returns what is kept from step to step, as it is kept, to be evaluated."""
        return self.optimizer.state, self._weights

    def state(self) -> dict[str, mx.array]:
        """Returns the optimiser's state by name, as if it had seen one array after the other."""
        shared = {key: array for key, array in self.optimizer.state.items() if key != _ALL}
        for kind, together in self.optimizer.state[_ALL].items():
            cut = zip(self.names, self._cut(together), strict=True)
            shared |= {f"{name}.{kind}": part for name, part in cut}
        return shared


class InGroups:
    """Each group of arrays by an update of its own, clipped by the norm of all.

    The state has the names that one update of all arrays would give it.
    """

    def __init__(
        self,
        optimizer: optimizers.Optimizer,
        clip_norm: float,
        params: Any,
        compiled: bool,
        group_of: Grouping,
    ):
        self.optimizer = optimizer
        groups: dict[Group, dict[str, mx.array]] = {}
        for name, array in tree_flatten(params):
            groups.setdefault(group_of(name, array), {})[name] = array
        self._names = [list(arrays) for arrays in groups.values()]
        self._rates = [group.rate for group in groups]
        self._updates = [
            make_update(_of_group(optimizer, group, arrays), clip_norm, arrays, compiled)
            for group, arrays in groups.items()
        ]

    def gathered(self, gradients: Any) -> tuple[list[Any], mx.array]:
        """Returns each group's gradients as its update takes them, and the norm of all."""
        parts = zip(self._updates, self._split(gradients), strict=True)
        gathered, norms = zip(*(update.gathered(part) for update, part in parts), strict=True)
        return list(gathered), mx.sqrt(mx.square(mx.stack(norms)).sum())

    def __call__(
        self, params: Any, gradients: list[Any], loss: mx.array, norm: mx.array, rate: float
    ) -> Any:
        self.optimizer.learning_rate = rate
        after: dict[str, mx.array] = {}
        parts = zip(self._updates, self._split(params), gradients, self._rates, strict=True)
        for update, part, own, ratio in parts:
            after |= update(part, own, loss, norm, rate * ratio)
        return tree_unflatten(list(after.items()))

    def held(self) -> Any:
        """Returns what is kept from step to step, as it is kept, to be evaluated."""
        return [update.held() for update in self._updates]

    def state(self) -> dict[str, mx.array]:
        """Returns the optimiser's state by name, as if there were no groups."""
        own = {name: array for update in self._updates for name, array in update.state().items()}
        return own | {"learning_rate": self.optimizer.learning_rate}

    def _split(self, tree: Any) -> list[dict[str, mx.array]]:
        arrays = dict(tree_flatten(tree))
        return [{name: arrays[name] for name in names} for names in self._names]


def _of_group(optimizer: optimizers.Optimizer, group: Group, arrays: dict) -> optimizers.Optimizer:
    """Returns a copy of the optimiser with the state of these arrays, kept under their whole names."""
    own = copy(optimizer)
    if not group.decays:
        own.weight_decay = 0.0
    state = state_arrays(optimizer)
    own.state = {key: mx.array(array) for key, array in state.items() if "." not in key}
    for name in arrays:
        first = f"{name}."
        own.state[name] = {
            key.removeprefix(first): array for key, array in state.items() if key.startswith(first)
        }
    return own


def _end_to_end(arrays: list[mx.array]) -> mx.array:
    return mx.concatenate([array.reshape(-1) for array in arrays])


def _clipped(optimizer: optimizers.Optimizer, clip_norm: float) -> Callable:
    def update(params, gradients, loss, norm):
        return optimizer.apply_gradients(clip(gradients, norm, clip_norm), params)

    return update


def _guarded(optimizer: optimizers.Optimizer, update: Callable) -> Callable:
    """Returns the update that leaves everything as it is where the gradients are of no use."""

    def guarded(params, gradients, loss, norm):
        before = tree_map(lambda array: array, optimizer.state)
        finite = mx.isfinite(loss) & mx.isfinite(norm)
        after = update(params, gradients, loss, norm)
        _keep_unless(finite, optimizer.state, before)
        return tree_map(lambda new, old: mx.where(finite, new, old), after, params)

    return guarded


def _compiled(update: Callable, optimizer: optimizers.Optimizer) -> Callable:
    state = [optimizer.state]
    return mx.compile(update, inputs=state, outputs=state)


def _keep_unless(useful: mx.array, state: Any, before: Any) -> None:
    """Puts the arrays of `before` back into an optimiser's state where `useful` is false, in place."""
    for place, old in before.items() if isinstance(before, dict) else enumerate(before):
        if isinstance(old, mx.array):
            state[place] = mx.where(useful, state[place], old)
        else:
            _keep_unless(useful, state[place], old)
