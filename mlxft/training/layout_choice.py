"""`trainer.layout=auto`: the prompt of a pair is forwarded once where that pays."""

import logging
from collections.abc import Sequence

from mlxft.config.choices import PAIR_OBJECTIVES
from mlxft.data.example import Pair

log = logging.getLogger("mlxft")

# Every piece is an attention call of its own: fewer tokens have to be worth more calls.
_WORTH = 1.1


def choose_layout(objective: str, rows: Sequence, usable: frozenset[str]) -> str:
    """Returns the layout that forwards the rows fastest among those the model can use, and logs why."""
    if objective not in PAIR_OBJECTIVES or "prefix_shared" not in usable:
        return "padded"
    apart, shared = forwarded(rows)
    layout = "prefix_shared" if apart >= _WORTH * shared else "padded"
    log_tokens(layout, rows)
    return layout


def log_tokens(layout: str, pairs: Sequence[Pair]) -> None:
    """Logs how many tokens a pair is with its prompt forwarded once, and how many in two padded rows."""
    apart, shared = forwarded(pairs)
    log.info(
        "layout: %s; %d tokens a pair with the prompt forwarded once, %d in two rows of one length",
        layout,
        shared // len(pairs),
        apart // len(pairs),
    )


def forwarded(pairs: Sequence[Pair]) -> tuple[int, int]:
    """Returns the tokens of all pairs as two rows padded to the longer, and with prompts forwarded once."""
    shared = sum(pair.num_tokens for pair in pairs)
    return sum(2 * pair.length for pair in pairs), shared
