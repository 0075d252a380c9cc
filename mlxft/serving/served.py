"""What is served: the engine, its names for clients, and the bounds on one request."""

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Optional

from mlxft.serving.engine import Engine
from mlxft.serving.requests import Refused

BASE_NAMES = ("local", "default", "default_model")


@dataclass(frozen=True)
class Bounds:
    """Of one request: bytes of its body, turns, answers; tokens of an answer, where it does not say."""

    body_bytes: int = 4_000_000
    max_messages: int = 1024
    max_choices: int = 8
    default_tokens: int = 1024


@dataclass
class Served:
    """An engine as clients see it.

    name: the model's. names: others that mean the same. default_adapter: of requests that name none.
    """

    engine: Engine
    name: str
    num_vocabulary: int
    names: tuple[str, ...] = ()
    bounds: Bounds = Bounds()
    default_adapter: Optional[str] = None
    temperature: float = 0.0
    thinking: bool = False
    created: int = field(default_factory=lambda: int(time.time()))

    def __post_init__(self):
        # One thread: a tokenizer is not to be called from two, and long prompts must not hold the loop.
        self._texts = ThreadPoolExecutor(1, "mlxft-text")

    @property
    def tokenizer(self) -> Any:
        return self.engine.tokenizer

    async def tokenised(self, make: Callable[..., list[int]], *arguments: Any) -> list[int]:
        return await self._in_thread(make, self.tokenizer, *arguments)

    async def check_schema(self, schema: Any) -> None:
        """Raises Refused for a schema that answers cannot be held to."""
        try:
            await self._in_thread(self.engine.grammars.check, schema)
        except (ValueError, TypeError) as error:
            raise Refused(
                f"the schema cannot be used: {error}", "bad_schema", 400, "response_format"
            ) from None

    async def _in_thread(self, work: Callable, *arguments: Any) -> Any:
        import asyncio

        return await asyncio.get_running_loop().run_in_executor(self._texts, work, *arguments)

    def adapter_of(self, model: str, adapter: Optional[str]) -> Optional[str]:
        """Returns the adapter that a request means, by `adapter` or by the model's name; None for the base.

        Raises: Refused for names that nothing has.
        """
        mounted = [resident.name for resident in self.engine.residents.listed()]
        if adapter is not None:
            if adapter == "none":
                return None
            if adapter not in mounted:
                raise Refused(
                    f"there is no adapter {adapter!r}; mounted: {', '.join(mounted) or 'none'}",
                    "adapter_not_found",
                    404,
                    "adapter",
                )
            return adapter
        if model in mounted:
            return model
        if model in BASE_NAMES or model in (self.name, *self.names):
            return self.default_adapter
        raise Refused(
            f"there is no model {model!r}; there are {', '.join(['local', self.name, *mounted])}",
            "model_not_found",
            404,
            "model",
        )

    def max_tokens(self, num_prompt: int, wanted: Optional[int]) -> int:
        """Returns how long an answer may get: as asked for, else what is usual and fits."""
        if wanted is not None:
            return wanted
        return max(min(self.bounds.default_tokens, self.engine.context - num_prompt), 1)

    def check_messages(self, number: int) -> None:
        if number > self.bounds.max_messages:
            raise Refused(
                f"{number} messages are more than the {self.bounds.max_messages} allowed",
                "too_many_messages",
                400,
                "messages",
            )

    def check_choices(self, number: int) -> int:
        most = min(self.bounds.max_choices, self.engine.limits.max_concurrent)
        if number > most:
            raise Refused(
                f"n: {number} answers are more than the {most} allowed", "too_many_choices", 400, "n"
            )
        return number

    def entries(self) -> list[dict[str, Any]]:
        """Returns what a list of models says: the served one, then each adapter as a model of its own."""
        shared = {
            "object": "model",
            "created": self.created,
            "owned_by": "mlxft",
            "context_window": self.engine.context,
            "max_tokens": self.engine.context,
            "reasoning": bool(self.tokenizer.has_thinking),
            "tools": bool(self.tokenizer.has_tool_calling),
            "input": ["text"],
        }
        adapters = [{"id": r.name, **shared, "parent": self.name} for r in self.engine.residents.listed()]
        return [{"id": self.name, **shared, "parent": None}, *adapters]
