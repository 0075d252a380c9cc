"""An adapter read from a folder, whatever layout it had there."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Callable, Optional, Sequence

import mlx.core as mx

from mlxft.errors import InputError
from mlxft.models import audit
from mlxft.models.targets import LinearLayer


@dataclass(frozen=True)
class LowRank:
    """One layer's update: a (in, r), b (r, out), y = W x + scale * B A x.

    Of an embedding a is (tokens, r), b (r, width); of experts a is (E, r, in), b (E, out, r). m: (out,), the
    rows' lengths of DoRA.
    """

    a: mx.array
    b: mx.array
    scale: float
    m: Optional[mx.array] = None

    @property
    def rank(self) -> int:
        return self.a.shape[1]

    @property
    def rank_of_b(self) -> int:
        """The rank as b has it."""
        return self.b.shape[0 if self.b.ndim == 2 else 2]

    def trimmed(self) -> "LowRank":
        """Returns the same update without the ranks that are zero in a and in b, of which one stays."""
        if self.a.ndim != 2:
            return self
        used = mx.any(self.a != 0, axis=0) | mx.any(self.b != 0, axis=1)
        places = [place for place, is_used in enumerate(used.tolist()) if is_used] or [0]
        if len(places) == self.rank:
            return self
        return LowRank(self.a[:, mx.array(places)], self.b[mx.array(places)], self.scale, self.m)

    def widened(self, rank: int, scale: float) -> "LowRank":
        """Returns the same update at a larger rank, filled up with zeros, and another scale, put into b."""
        if (self.rank, self.scale) == (rank, scale):
            return self
        more = (0, rank - self.rank)
        a, b = self.a.astype(mx.float32), self.b.astype(mx.float32) * (self.scale / scale)
        none = [(0, 0)]
        if a.ndim == 2:
            return LowRank(mx.pad(a, [*none, more]), mx.pad(b, [more, *none]), scale, self.m)
        return LowRank(mx.pad(a, [*none, more, *none]), mx.pad(b, [*none, *none, more]), scale, self.m)


@dataclass(frozen=True)
class Adapter:
    """What a folder holds: low-rank updates by module path; whole weights by name, of all or of some modules.

    chosen: given a model's layers, the paths that the folder's own configuration says are adapted (to find
    what is missing). embeddings: of the base that it was trained on, by path, where the folder has them.
    is_tied: whether what is said of an embedding is meant for the head too where the two are one.
    chosen_are_all: whether other layers than the chosen ones are an error.
    num_new_tokens: that it brings with it, None where the folder does not say.
    """

    folder: Path
    kind: str  # lora | dora | full
    layers: dict[str, LowRank] = field(default_factory=dict)
    weights: dict[str, mx.array] = field(default_factory=dict)
    chosen: Callable[[list[LinearLayer]], set[str]] = lambda layers: set()
    embeddings: dict[str, mx.array] = field(default_factory=dict)
    is_tied: bool = True
    num_new_tokens: Optional[int] = 0
    chosen_are_all: bool = False


def check_finite(tensors: dict[str, mx.array], file: Path) -> None:
    """Raises: InputError for tensors with values that are no finite numbers."""
    finite = {name: mx.all(mx.isfinite(tensor)) for name, tensor in tensors.items()}
    mx.eval(finite)
    wrong = [name for name, is_finite in finite.items() if not is_finite.item()]
    if wrong:
        more = f" and {len(wrong) - 1} more" if len(wrong) > 1 else ""
        raise InputError(
            f"{file}: {wrong[0]}{more} has values that are not finite (nan or inf), which no answer can come "
            "of. Take another checkpoint's adapter, or another copy of the file"
        )


def read_tensors(file: Path) -> dict[str, mx.array]:
    """Returns the tensors of a safetensors file. Raises: InputError if it is damaged."""
    audit.tensor_names(file)
    try:
        tensors = mx.load(str(file))
        mx.eval(tensors)
    except (RuntimeError, ValueError) as error:
        raise InputError(f"{file} cannot be read: {error}") from error
    return tensors


def together(tensors: dict[str, mx.array], suffixes: Sequence[str], file: Path) -> dict[str, tuple]:
    """Returns the tensors named path + one of the `suffixes`, in their order, by module path.

    Raises: InputError listing tensors with other names, or those that lack one of the others.
    """
    halves: dict[str, dict[str, mx.array]] = {}
    unknown = []
    for name, tensor in sorted(tensors.items()):
        suffix = next((s for s in suffixes if name.endswith(s)), None)
        if suffix is None:
            unknown.append(described(name, tensor))
        else:
            halves.setdefault(name.removesuffix(suffix), {})[suffix] = tensor
    if unknown:
        raise InputError(f"{file}: not the tensors of a linear layer's LoRA: {audit.listed(unknown)}")
    missing = [path + s for path, found in halves.items() for s in suffixes if s not in found]
    if missing:
        raise InputError(f"{file}: missing tensors: {audit.listed(missing)}")
    flat = [described(path + s, half) for path, found in halves.items() for s, half in found.items()
            if half.ndim not in ((2, 3) if s in suffixes[:2] else (1,))]
    if flat:
        raise InputError(f"{file}: not matrices, so not the LoRA of linear layers: {audit.listed(flat)}")
    return {path: tuple(found[suffix] for suffix in suffixes) for path, found in halves.items()}


def described(name: str, tensor: mx.array) -> str:
    """Returns a tensor as it stands in a message: its name and its shape."""
    return f"{name} {tuple(tensor.shape)}"


def number(config: dict, key: str, file: Path) -> float:
    """Returns the number config[key]. Raises: InputError naming file and key."""
    value = config.get(key)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise InputError(f"{file}: {key} is {value!r}, expected a number")
    return value
