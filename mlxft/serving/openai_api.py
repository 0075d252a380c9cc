"""OpenAI's /v1/chat/completions and /v1/completions."""

import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Optional

from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response

from mlxft.serving.answers import Answers, EventStream, data, unless_left
from mlxft.serving.prompts import chat_tokens, text_tokens
from mlxft.serving.requests import End, Failure, Piece, Refused, Request, Token
from mlxft.serving.sampling import Sampling, seed_of
from mlxft.serving.served import Served
from mlxft.serving.text import AnswerParts, Said
from mlxft.serving.wire import ChatRequest, CompletionRequest, Drawing, JsonFormat, JsonSchemaFormat


@dataclass
class _Gathered:
    """One choice of an answer so far."""

    content: str = ""
    reasoning: str = ""
    calls: list[dict[str, Any]] = field(default_factory=list)
    tokens: list[Token] = field(default_factory=list)
    end: Optional[End] = None

    def add(self, said: Said) -> None:
        self.content += said.content
        self.reasoning += said.reasoning
        self.calls += said.calls

    @property
    def reason(self) -> str:
        return "tool_calls" if self.calls and self.end.reason == "stop" else self.end.reason


async def answer_chat(served: Served, wanted: ChatRequest, http: HttpRequest) -> Response:
    """Returns the answer to a conversation, whole or as a stream. Raises: Refused, ClientLeft."""
    served.check_messages(len(wanted.messages))
    tools = None
    if wanted.tools and wanted.tool_choice != "none":
        tools = [tool.model_dump(exclude_none=True) for tool in wanted.tools]
    turns = [message.model_dump(exclude_none=True) for message in wanted.messages]
    prompt = await served.tokenised(chat_tokens, turns, tools, _template_settings(served, wanted))
    requests = _requests(served, wanted, prompt, _num_top(wanted))
    if (schema := _schema(wanted)) is not None:
        await served.check_schema(schema)
        requests = [replace(request, schema=schema) for request in requests]
    chat = _Chat(served, wanted, [AnswerParts(served.tokenizer, prompt, tools) for _ in requests])
    return await _respond(chat, Answers(served.engine, requests), http)


async def answer_completion(served: Served, wanted: CompletionRequest, http: HttpRequest) -> Response:
    """Returns the continuation of a text, whole or as a stream. Raises: Refused, ClientLeft."""
    prompt = await served.tokenised(text_tokens, wanted.prompt)
    requests = _requests(served, wanted, prompt, wanted.logprobs)
    completion = _Completion(served, wanted, [None] * len(requests))
    return await _respond(completion, Answers(served.engine, requests), http)


def _requests(served: Served, wanted: Drawing, prompt: list[int], num_top: Optional[int]) -> list[Request]:
    """Returns a request for each of the n answers, their seeds one after the other."""
    number = served.check_choices(wanted.n or 1)
    sampling = sampling_of(wanted, served.temperature)
    adapter = served.adapter_of(wanted.model, wanted.adapter)
    most = served.max_tokens(len(prompt), getattr(wanted, "max_completion_tokens", None) or wanted.max_tokens)
    stop = [wanted.stop] if isinstance(wanted.stop, str) else list(wanted.stop or [])
    for token in sampling.logit_bias:
        if token >= served.num_vocabulary:
            raise Refused(f"logit_bias: the model has no token {token}", "bad_token", 400, "logit_bias")
    seed = seed_of(wanted.seed)
    seeds = [(seed + number) % (1 << 64) for number in range(number)]
    return [
        Request(prompt, most, lambda event: None, replace(sampling, seed=each), stop, adapter, num_top)
        for each in seeds
    ]


def sampling_of(wanted: Drawing, temperature: float) -> Sampling:
    """Returns how the request's tokens are drawn, all but the seed."""
    names = Sampling.__dataclass_fields__.keys() - {"seed", "logit_bias"}
    given = {name: value for name in names if (value := getattr(wanted, name)) is not None}
    bias = {int(token): value for token, value in (wanted.logit_bias or {}).items()}
    return Sampling(**{"temperature": temperature} | given, logit_bias=bias)


def _template_settings(served: Served, wanted: ChatRequest) -> dict[str, Any]:
    settings: dict[str, Any] = {"enable_thinking": served.thinking}
    if wanted.reasoning_effort is not None:
        settings["enable_thinking"] = wanted.reasoning_effort != "none"
    return settings | (wanted.chat_template_kwargs or {})


def _num_top(wanted: ChatRequest) -> Optional[int]:
    if wanted.top_logprobs is not None and not wanted.logprobs:
        raise Refused("top_logprobs needs logprobs: true", "bad_logprobs", 400, "top_logprobs")
    return (wanted.top_logprobs or 0) if wanted.logprobs else None


def _schema(wanted: ChatRequest) -> Any:
    if isinstance(wanted.response_format, JsonFormat):
        return {"type": "object"}
    if isinstance(wanted.response_format, JsonSchemaFormat):
        return wanted.response_format.json_schema.schema_
    return None


async def _respond(kind: "_Kind", answers: Answers, http: HttpRequest) -> Response:
    if kind.wanted.stream:
        return EventStream(kind.streamed(answers), answers.close)
    try:
        return JSONResponse(await unless_left(http, kind.whole(answers)))
    finally:
        answers.close()


class _Kind(ABC):
    """What the two endpoints have in common: choices are gathered, or shown piece by piece."""

    object = chunk_object = prefix = ""

    def __init__(self, served: Served, wanted: Drawing, parts: Sequence[Optional[AnswerParts]]):
        self.served, self.wanted, self.parts = served, wanted, parts
        self.id, self.created = f"{self.prefix}-{uuid.uuid4().hex}", int(time.time())
        self.choices = [_Gathered() for _ in parts]

    async def whole(self, answers: Answers) -> dict[str, Any]:
        """Returns the body of an answer. Raises: Refused for one that could not be finished."""
        async for number, event in answers:
            if isinstance(event, Failure):
                raise Refused(event.message, "failed", event.status)
            self.take(number, event)
        return self.head(self.object) | {
            "choices": [self.choice(number, each) for number, each in enumerate(self.choices)],
            "usage": self.usage(),
        }

    async def streamed(self, answers: Answers) -> AsyncIterator[str]:
        for chunk in self.first_chunks():
            yield data(self.chunk([chunk]))
        async for number, event in answers:
            if isinstance(event, Failure):
                yield data(error_body(event.message, "failed", event.status))
                return
            for chunk in self.chunks(number, event, self.take(number, event)):
                yield data(self.chunk([chunk]))
        options = self.wanted.stream_options
        if options and options.include_usage:
            yield data(self.head(self.chunk_object) | {"choices": [], "usage": self.usage()})
        yield data("[DONE]")

    def take(self, number: int, event: Piece | End) -> tuple[Said, list[Token]]:
        """Adds an event to its choice; returns what it says and its tokens."""
        choice, parts = self.choices[number], self.parts[number]
        tokens: list[Token] = []
        if isinstance(event, End):
            said, choice.end = parts.finish() if parts else Said(), event
        else:
            said, tokens = parts.feed(event.text) if parts else Said(event.text), event.tokens
        choice.add(said)
        choice.tokens += tokens
        return said, tokens

    def head(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.wanted.model}

    def chunk(self, choices: list[dict]) -> dict[str, Any]:
        options = self.wanted.stream_options
        usage = {"usage": None} if options and options.include_usage else {}
        return self.head(self.chunk_object) | {"choices": choices} | usage

    def usage(self) -> dict[str, Any]:
        ends = [choice.end for choice in self.choices]
        prompt, completion = ends[0].prompt_tokens, sum(end.completion_tokens for end in ends)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": max(end.cached_tokens for end in ends)},
        }

    def piece(self, token: int) -> str:
        return self.served.tokenizer.decode([token])

    @abstractmethod
    def first_chunks(self) -> list[dict]:
        """Returns the choices of the chunks that come before any token."""

    @abstractmethod
    def chunks(self, number: int, event: Piece | End, taken: tuple[Said, list[Token]]) -> list[dict]:
        """Returns the choices of the chunks that an event makes. taken: what it says and its tokens."""

    @abstractmethod
    def choice(self, number: int, gathered: _Gathered) -> dict[str, Any]:
        """Returns a choice of a whole answer."""


class _Chat(_Kind):
    object, chunk_object, prefix = "chat.completion", "chat.completion.chunk", "chatcmpl"

    def choice(self, number: int, gathered: _Gathered) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": gathered.content}
        if gathered.reasoning:
            message["reasoning_content"] = gathered.reasoning
        if gathered.calls:
            message["tool_calls"] = [_tool_call(call) for call in gathered.calls]
            message["content"] = gathered.content.strip() or None
        return {
            "index": number,
            "message": message,
            "logprobs": self.logprobs(gathered.tokens),
            "finish_reason": gathered.reason,
        }

    def first_chunks(self) -> list[dict]:
        delta = {"role": "assistant", "content": ""}
        return [
            {"index": number, "delta": delta, "logprobs": None, "finish_reason": None}
            for number in range(len(self.choices))
        ]

    def chunks(self, number: int, event: Piece | End, taken: tuple[Said, list[Token]]) -> list[dict]:
        said, tokens = taken
        gathered, deltas = self.choices[number], []
        if said.reasoning:
            deltas.append({"reasoning_content": said.reasoning})
        if said.content or (tokens and not said.reasoning):
            deltas.append({"content": said.content})
        before = len(gathered.calls) - len(said.calls)
        deltas += [
            {"tool_calls": [{"index": before + place, **_tool_call(call)}]}
            for place, call in enumerate(said.calls)
        ]
        out = [{"index": number, "delta": delta, "logprobs": None, "finish_reason": None} for delta in deltas]
        if tokens and out:
            out[0]["logprobs"] = self.logprobs(tokens)
        if isinstance(event, End):
            out.append({"index": number, "delta": {}, "logprobs": None, "finish_reason": gathered.reason})
        return out

    def logprobs(self, tokens: list[Token]) -> Optional[dict[str, Any]]:
        if not self.wanted.logprobs:
            return None
        return {
            "refusal": None,
            "content": [
                self.entry(token.id, token.logprob)
                | {"top_logprobs": [self.entry(*each) for each in token.top]}
                for token in tokens
            ],
        }

    def entry(self, token: int, logprob: float) -> dict[str, Any]:
        piece = self.piece(token)
        return {"id": token, "token": piece, "logprob": _finite(logprob), "bytes": list(piece.encode())}


class _Completion(_Kind):
    object, chunk_object, prefix = "text_completion", "text_completion", "cmpl"

    def choice(self, number: int, gathered: _Gathered) -> dict[str, Any]:
        return {
            "index": number,
            "text": gathered.content,
            "logprobs": self.logprobs(gathered.tokens),
            "finish_reason": gathered.reason,
        }

    def first_chunks(self) -> list[dict]:
        return []

    def chunks(self, number: int, event: Piece | End, taken: tuple[Said, list[Token]]) -> list[dict]:
        said, tokens = taken
        ended = isinstance(event, End)
        if not (said.content or tokens or ended):
            return []
        return [
            {
                "index": number,
                "text": said.content,
                "logprobs": self.logprobs(tokens) if tokens else None,
                "finish_reason": self.choices[number].reason if ended else None,
            }
        ]

    def logprobs(self, tokens: list[Token]) -> Optional[dict[str, Any]]:
        if self.wanted.logprobs is None:
            return None
        pieces = [self.piece(token.id) for token in tokens]
        offsets, at = [], 0
        for piece in pieces:
            offsets.append(at)
            at += len(piece)
        return {
            "tokens": pieces,
            "token_logprobs": [_finite(token.logprob) for token in tokens],
            "top_logprobs": [{self.piece(i): _finite(v) for i, v in token.top} for token in tokens],
            "text_offset": offsets,
        }


def _tool_call(call: dict[str, Any]) -> dict[str, Any]:
    function = {"name": call["name"], "arguments": call["arguments"]}
    return {"id": call["id"], "type": "function", "function": function}


def _finite(logprob: float) -> float:
    """JSON has no infinity: a token that was forbidden gets what OpenAI gives very unlikely ones."""
    return max(logprob, -9999.0)


_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "invalid_request_error",
    405: "invalid_request_error",
    409: "invalid_request_error",
    413: "invalid_request_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
}


def error_body(message: str, code: Optional[str], status: int, param: Optional[str] = None) -> dict[str, Any]:
    """Returns an error in OpenAI's form."""
    kind = "memory_admission" if code == "context_over_budget" else _TYPES.get(status, "server_error")
    shown = message.encode("utf-8", "backslashreplace").decode()
    return {"error": {"message": shown, "type": kind, "param": param, "code": code}}
