"""What the engine is asked, what it answers, and what it says to a request that it cannot take."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Optional

from mlxft.errors import MlxftError
from mlxft.serving.residents import Resident
from mlxft.serving.sampling import Sampling


class Refused(MlxftError):
    """A request that cannot be taken. code: a name for it. status: of HTTP."""

    def __init__(self, message: str, code: str, status: int = 400, param: Optional[str] = None):
        super().__init__(message)
        self.code, self.status, self.param = code, status, param


@dataclass(frozen=True)
class Token:
    """A token of an answer. top: the likeliest (id, log-probability) at its place, the first the highest."""

    id: int
    logprob: float
    top: list[tuple[int, float]] = field(default_factory=list)


@dataclass(frozen=True)
class Piece:
    """Text that is certain by now, and the tokens since the last piece."""

    text: str
    tokens: list[Token]


@dataclass(frozen=True)
class End:
    """The end of an answer. reason: stop | length. stopped_by: the stop string, where it was one."""

    reason: str
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    stopped_by: Optional[str] = None


@dataclass(frozen=True)
class Failure:
    """An answer that could not be finished, and why."""

    message: str
    status: int = 500


Event = Piece | End | Failure


@dataclass(eq=False)
class Request:
    """One answer that is wanted.

    prompt: tokens. adapter: a mounted one's name, None for the base. num_top: log-probabilities of how many
    likeliest tokens, None for none at all. schema: that the answer has to hold to. deliver: called by the
    engine's thread with each event, the last an End or a Failure; it must not block.
    """

    prompt: list[int]
    max_tokens: int
    deliver: Callable[[Event], None]
    sampling: Sampling = Sampling()
    stop: list[str] = field(default_factory=list)
    adapter: Optional[str] = None
    num_top: Optional[int] = None
    schema: Any = None
    resident: Optional[Resident] = None

    @property
    def most_tokens(self) -> int:
        return len(self.prompt) + self.max_tokens
