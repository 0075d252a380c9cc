"""Log-probabilities of continuations: what several of them begin with is forwarded once.

Choices of one question share the question, questions of one task the examples before them. Requests are
sorted, so that those with the longest beginnings in common stand side by side, and put end to end into
forwards of a bounded number of tokens: nothing is padded, and of the logits one chunk exists at a time.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from mlxft.backend import shape_multiple
from mlxft.errors import GuardStop
from mlxft.layouts.arrange import Arrangement, Arranger, Group, num_same, tree
from mlxft.layouts.cache import TrainingCache
from mlxft.losses import stepped_scores
from mlxft.models.decoder import DecoderView
from mlxft.segmented.gradients import hidden_states, target_rows, trained_head
from mlxft.training.objectives.common import HeadPlan, Targets

_NO_PROMPT = np.zeros(0, np.int32)


@dataclass(frozen=True)
class Continuation:
    """What is scored after what. context: (P,) int32; tokens: (C,) int32; at least one token each."""

    context: np.ndarray
    tokens: np.ndarray

    @property
    def row(self) -> np.ndarray:
        return np.concatenate([self.context, self.tokens])

    @property
    def num_forwarded(self) -> int:
        """Tokens of a forward of its own: nothing needs to read the last one."""
        return len(self.context) + len(self.tokens) - 1


@dataclass(frozen=True)
class Score:
    """logp: sum of the tokens' log-probabilities in nats. is_greedy: each of them is the likeliest."""

    logp: float
    is_greedy: bool


@dataclass
class Scorer:
    """Scores continuations with a model.

    batch_tokens: of one forward; a longer continuation has one of its own. forwarded: tokens so far, what
    rounds up among them. alone: what it would have been with a forward for each continuation.
    """

    view: DecoderView
    head: HeadPlan = HeadPlan()
    batch_tokens: int = 4096
    forwarded: int = 0
    alone: int = 0

    def __call__(self, continuations: Sequence[Continuation]) -> list[Score]:
        """Returns the scores in the order of the continuations. Raises: GuardStop where one is not finite."""
        scores: list[Score] = [None] * len(continuations)
        for numbers in self.batches(continuations):
            batch = [continuations[number] for number in numbers]
            for number, score in zip(numbers, self._scored(batch), strict=True):
                scores[number] = score
        broken = sum(not np.isfinite(score.logp) for score in scores)
        if broken:
            raise GuardStop(
                f"the log-probabilities of {broken:,} of {len(scores):,} continuations are not finite. The "
                "weights may hold inf or nan, or model.dtype be too narrow for them"
            )
        return scores

    @property
    def shares(self) -> bool:
        """Whether the model can be run with shared beginnings; else rows are padded to one length."""
        return "prefix_shared" in self.view.layouts

    def batches(self, continuations: Sequence[Continuation]) -> Iterator[list[int]]:
        """Yields the numbers of the continuations of each forward."""
        rows = [each.row for each in continuations]
        if self.shares:
            order = sorted(range(len(rows)), key=lambda number: rows[number].astype(">i4").tobytes())
        else:
            order = sorted(range(len(rows)), key=lambda number: len(rows[number]))
        batch: list[int] = []
        taken = 0
        for number in order:
            length = len(rows[number]) - 1
            if self.shares:
                more = length - (num_same(rows[batch[-1]][:-1], rows[number][:-1]) if batch else 0)
            else:
                more = length * (len(batch) + 1) - taken
            if batch and taken + more > self.batch_tokens:
                yield batch
                batch, taken, more = [], 0, length
            batch.append(number)
            taken += more
        if batch:
            yield batch

    def _scored(self, batch: Sequence[Continuation]) -> Iterable[Score]:
        arranged = self._arranged([each.row for each in batch])
        targets = Targets(arranged)
        for number, each in enumerate(batch):
            mask = np.arange(len(each.row)) >= len(each.context)
            targets.add(number, each.row, mask)
        inputs = targets.inputs(shape_multiple())
        with self.view.active():
            hidden = hidden_states(self.view, inputs["tokens"], TrainingCache(arranged.layout))
            rows = target_rows(hidden, inputs)
            chunk = self.head.chunk_for(rows.shape[0])
            logps, likeliest = stepped_scores(rows, trained_head(self.view), inputs["targets"], chunk)
        self.forwarded += arranged.num_positions
        self.alone += sum(each.num_forwarded for each in batch)
        edges = np.cumsum([len(each.tokens) for each in batch])[:-1]
        used = sum(len(each.tokens) for each in batch)  # without what rounds up
        logps, likeliest = np.array(logps, np.float64)[:used], np.array(likeliest)[:used]
        for logp, greedy in zip(np.split(logps, edges), np.split(likeliest, edges), strict=True):
            yield Score(float(logp.sum()), bool(greedy.all()))

    def _arranged(self, rows: Sequence[np.ndarray]) -> Arrangement:
        if self.shares:
            return tree(rows, shape_multiple())
        return Arranger("padded", shape_multiple())([Group(_NO_PROMPT, (row,)) for row in rows])
