"""What tests of preference losses share: the rows of pairs.npz, and gradients by finite differences."""

from dataclasses import dataclass
from pathlib import Path
from typing import Callable

import mlx.core as mx
import numpy as np

from mlxft.losses import linear_logps, row_sums

PARITY = Path(__file__).parent.parent / "parity"
LOSS_REL, GRADIENT_REL = 5e-6, 2e-5  # tests/parity/README.md, `pairs` on a CPU in float32

# Rows of pairs.npz by the kind that `row_kind` there gives.
ONE_TOKEN, VERY_NEGATIVE, CONFIDENT, IDENTICAL, MASKED_CHOSEN, SATURATED = 2, 4, 5, 6, 7, 8
CHUNK = 50  # a few chunks of supervised tokens


@dataclass(frozen=True)
class PairRows:
    """Some pairs of pairs.npz: all chosen rows, then all rejected; N rows, T positions, H width."""

    data: dict[str, np.ndarray]

    @property
    def num_pairs(self) -> int:
        return len(self.data["input_ids"]) // 2

    @property
    def hidden(self) -> mx.array:
        return mx.array(self.data["hidden"])

    @property
    def ref_hidden(self) -> mx.array:
        return mx.array(self.data["ref_hidden"])

    @property
    def weight(self) -> mx.array:
        return mx.array(self.data["head_weight"])

    def counts(self, mask: str = "completion_mask") -> mx.array:
        """Returns the targets (N,) of each row among the tokens of `mask`."""
        return mx.array(self.data[mask][:, 1:].sum(1))

    def logps(self, hidden: mx.array, weight: mx.array, mask: str = "completion_mask") -> mx.array:
        """Returns the summed log-probability (N,) of each row's tokens of `mask`."""
        ids, num_rows = self.data["input_ids"], len(self.data["input_ids"])
        rows, positions = np.nonzero(self.data[mask][:, 1:])
        targets = mx.array(ids[:, 1:][rows, positions])
        rows, positions = mx.array(rows), mx.array(positions)
        return row_sums(linear_logps(hidden[rows, positions], weight, targets, CHUNK), rows, num_rows)

    def split(self, rows: mx.array) -> tuple[mx.array, mx.array]:
        """Returns the chosen and the rejected half of (N,)."""
        return rows[: self.num_pairs], rows[self.num_pairs :]

    def answers(self, hidden: mx.array, weight: mx.array) -> tuple[mx.array, mx.array]:
        """Returns the summed log-probabilities (P,) of chosen and of rejected answers."""
        return self.split(self.logps(hidden, weight))

    def answer_means(self, hidden: mx.array, weight: mx.array) -> tuple[mx.array, mx.array]:
        """Returns the mean log-probabilities (P,); nan for an answer without a target."""
        return self.split(self.logps(hidden, weight) / self.counts())


def pair_rows(*pairs: int) -> PairRows:
    """Returns these pairs, or all."""
    data = dict(np.load(PARITY / "pairs.npz"))
    total = len(data["input_ids"]) // 2
    chosen = np.array(pairs or range(total))
    rows = np.concatenate([chosen, chosen + total])
    by_row = ("input_ids", "attention_mask", "completion_mask", "hidden", "ref_hidden")
    return PairRows({key: value[rows] if key in by_row else value for key, value in data.items()})


def relative(value: mx.array, reference: np.ndarray) -> float:
    """Returns the largest difference over the largest entry of the reference."""
    return float(np.abs(np.asarray(value) - reference).max() / np.abs(reference).max())


def assert_equals_reference(loss: Callable, rows: PairRows, reference, variant: str) -> None:
    """Asserts that the mean loss(hidden, weight) and its gradients equal TRL's and float64's numbers."""
    value, gradients = mx.value_and_grad(loss, argnums=(0, 1))(rows.hidden, rows.weight)
    for source in ("trl", "exact"):
        if f"{variant}.{source}.loss" not in reference:
            assert source == "trl"
            continue
        expected = float(reference[f"{variant}.{source}.loss"])
        assert abs(value.item() - expected) <= LOSS_REL * abs(expected)
        for gradient, name in zip(gradients, ("grad_hidden", "grad_head_weight"), strict=True):
            assert relative(gradient, reference[f"{variant}.{source}.{name}"]) < GRADIENT_REL


def assert_means_equal_trl(metrics: dict[str, mx.array], reference, variant: str) -> None:
    """Asserts that the mean over pairs of each metric is what TRL logged for the batch."""
    for name, values in metrics.items():
        expected = float(reference[f"{variant}.trl.metric.{name}"])
        assert values.dtype == mx.float32
        # Absolute below 1: a margin is a difference of rewards a hundred times its size.
        assert abs(values.mean().item() - expected) <= LOSS_REL * max(1.0, abs(expected)), name


def central_differences(function: Callable, *arguments: float, step: float = 1e-5) -> list[float]:
    """Returns the derivatives of a float64 function by each of its arguments, right to about 1e-9."""
    derivatives = []
    for i, x in enumerate(arguments):
        above, below = list(arguments), list(arguments)
        above[i], below[i] = x + step, x - step
        derivatives.append((function(*above) - function(*below)) / (2 * step))
    return derivatives


def gradients(loss: Callable, *arguments: float) -> list[float]:
    """Returns the derivatives that MLX finds of one pair's loss by each argument."""
    arrays = [mx.array([x]) for x in arguments]
    by_all = mx.grad(lambda *given: loss(*given).sum(), argnums=list(range(len(arrays))))
    return [gradient.item() for gradient in by_all(*arrays)]
