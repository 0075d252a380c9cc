"""Requests' events on the server's loop, and responses that end when their client leaves."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from mlxft.serving.engine import Engine
from mlxft.serving.requests import End, Event, Failure, Request


class ClientLeft(Exception):
    """The client closed its connection before its answer was there."""


class Answers:
    """The events of some requests, in the order in which they come, as (request's number, event)."""

    def __init__(self, engine: Engine, requests: Sequence[Request]):
        """Submits them. Raises: Refused."""
        self._engine, self._requests = engine, list(requests)
        self._loop = asyncio.get_running_loop()
        self._events: asyncio.Queue[tuple[int, Event]] = asyncio.Queue()
        self._open = set(range(len(requests)))
        for number, request in enumerate(requests):
            request.deliver = self._deliver_of(number)
        engine.submit(*requests)

    def _deliver_of(self, number: int) -> Callable[[Event], None]:
        def deliver(event: Event) -> None:
            with suppress(RuntimeError):  # the loop is closed: nobody is there any more
                self._loop.call_soon_threadsafe(self._events.put_nowait, (number, event))

        return deliver

    async def __aiter__(self) -> AsyncIterator[tuple[int, Event]]:
        while self._open:
            number, event = await self._events.get()
            if isinstance(event, End | Failure):
                self._open.discard(number)
            yield number, event

    def close(self) -> None:
        """Gives up what has not ended yet; its places are free at the engine's next step."""
        for number in self._open:
            self._engine.cancel(self._requests[number])
        self._open = set()


async def unless_left(http: HttpRequest, work: Awaitable[Any]) -> Any:
    """Returns what `work` returns. Raises: ClientLeft when the client goes before that."""
    working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(_left(http.receive))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientLeft
    finally:
        await _end(working, leaving)


class EventStream(Response):
    """Server-sent events, until they end or the client leaves; then `close` is called, in any case."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncIterator[str], close: Callable[[], None]):
        super().__init__()
        self._events, self._close = events, close
        del self.headers["content-length"]
        self.headers["cache-control"] = "no-cache"

    async def __call__(self, scope, receive, send) -> None:
        sending = asyncio.ensure_future(self._send(send))
        leaving = asyncio.ensure_future(_left(receive))
        try:
            await asyncio.wait({sending, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if sending.done():
                sending.result()
        finally:
            await _end(sending, leaving)
            self._close()

    async def _send(self, send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async for text in self._events:
            await send({"type": "http.response.body", "body": text.encode(), "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _left(receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _end(*tasks: asyncio.Future) -> None:
    for task in tasks:
        if not task.done():
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task


def data(content: Any, event: str = "") -> str:
    """Returns one server-sent event."""
    text = content if isinstance(content, str) else json.dumps(content)
    return (f"event: {event}\n" if event else "") + f"data: {text}\n\n"
