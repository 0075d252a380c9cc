"""What a request passes before anything looks at it: the API key, and the size of its body."""

import hmac
import json
from typing import Any, Optional

from mlxft.serving import anthropic_api, openai_api

ANTHROPIC_PATH = "/v1/messages"


def error_for(path: str, message: str, code: Optional[str], status: int, param: Optional[str] = None) -> dict:
    """Returns an error in the form that clients of `path` read."""
    if path == ANTHROPIC_PATH:
        return anthropic_api.error_body(message, status)
    return openai_api.error_body(message, code, status, param)


class Guards:
    """ASGI middleware. api_key: None for none; compared in constant time. /health is open to all."""

    def __init__(self, app: Any, api_key: Optional[str], body_bytes: int):
        self.app, self._body_bytes = app, body_bytes
        self._key = None if api_key is None else api_key.encode()

    async def __call__(self, scope, receive, send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        headers = dict(scope["headers"])
        if self._key is not None and scope["path"] != "/health" and not self._knows(headers):
            return await self._refuse(scope, send, 401, "the API key is missing or wrong", "invalid_api_key")
        length = headers.get(b"content-length", b"0")
        if length.isdigit() and int(length) > self._body_bytes:
            return await self._too_large(scope, send)
        body, more = b"", True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                return None
            body, more = body + message.get("body", b""), message.get("more_body", False)
            if len(body) > self._body_bytes:
                return await self._too_large(scope, send)
        sent = False

        async def read() -> dict:
            nonlocal sent
            if sent:
                return await receive()
            sent = True
            return {"type": "http.request", "body": body, "more_body": False}

        return await self.app(scope, read, send)

    def _knows(self, headers: dict[bytes, bytes]) -> bool:
        given = headers.get(b"x-api-key")
        if given is None:
            scheme, _, given = headers.get(b"authorization", b"").partition(b" ")
            if scheme.lower() != b"bearer":
                return False
        return hmac.compare_digest(given.strip(), self._key)

    async def _too_large(self, scope, send) -> None:
        await self._refuse(scope, send, 413, f"the body is larger than {self._body_bytes} bytes", "too_large")

    async def _refuse(self, scope, send, status: int, message: str, code: str) -> None:
        body = json.dumps(error_for(scope["path"], message, code, status)).encode()
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        if status == 401:
            headers.append((b"www-authenticate", b"Bearer"))
        if status == 413:
            headers.append((b"connection", b"close"))
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body})
