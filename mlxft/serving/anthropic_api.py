"""Anthropic's /v1/messages."""

import json
import uuid
from collections.abc import AsyncIterator
from typing import Annotated, Any, Literal, Optional

from pydantic import BaseModel, Field
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response

from mlxft.serving.answers import Answers, EventStream, data, unless_left
from mlxft.serving.prompts import chat_tokens
from mlxft.serving.requests import End, Failure, Refused, Request
from mlxft.serving.sampling import Sampling, seed_of
from mlxft.serving.served import Served
from mlxft.serving.text import AnswerParts, Said
from mlxft.serving.wire import Count, Name, Share, StopTexts, Strict, Text


class TextBlock(Strict):
    type: Literal["text"]
    text: Text
    cache_control: Any = None
    citations: None = None


class ThinkingBlock(Strict):
    type: Literal["thinking"]
    thinking: Text
    signature: Optional[str] = None


class ToolUseBlock(Strict):
    type: Literal["tool_use"]
    id: str
    name: Name
    input: dict[str, Any]
    cache_control: Any = None
    caller: Any = None


class ToolResultBlock(Strict):
    type: Literal["tool_result"]
    tool_use_id: str
    content: Optional[Text | list[TextBlock]] = None
    is_error: Optional[bool] = None
    cache_control: Any = None


Block = Annotated[TextBlock | ThinkingBlock | ToolUseBlock | ToolResultBlock, Field(discriminator="type")]


class Turn(Strict):
    role: Literal["user", "assistant"]
    content: Text | Annotated[list[Block], Field(max_length=4096)]


class AnthropicTool(Strict):
    type: Literal["custom"] = "custom"
    name: Name
    description: Optional[Text] = None
    input_schema: dict[str, Any]
    cache_control: Any = None


class ToolChoice(Strict):
    type: Literal["auto", "none"]
    disable_parallel_tool_use: Optional[Literal[False]] = None


class Thinking(Strict):
    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Optional[int] = None


class MessagesRequest(Strict):
    model: Name
    max_tokens: Count
    messages: Annotated[list[Turn], Field(min_length=1)]
    system: Optional[Text | list[TextBlock]] = None
    stream: Optional[bool] = None
    temperature: Optional[Share] = None
    top_p: Optional[Annotated[float, Field(gt=0, le=1)]] = None
    top_k: Optional[Annotated[int, Field(ge=0, le=1 << 24)]] = None
    stop_sequences: Optional[StopTexts] = None
    tools: Optional[Annotated[list[AnthropicTool], Field(max_length=256)]] = None
    tool_choice: Optional[ToolChoice] = None
    thinking: Optional[Thinking] = None
    metadata: Optional[dict[str, Any]] = Field(None, description="taken, without effect")
    adapter: Optional[Name] = Field(None, description='a mounted adapter, or "none" for the base')


class AnthropicUsage(BaseModel):
    input_tokens: int
    output_tokens: int
    cache_read_input_tokens: int = 0


class MessageAnswer(BaseModel):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[dict[str, Any]]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]
    stop_sequence: Optional[str]
    usage: AnthropicUsage


class AnthropicErrorBody(BaseModel):
    type: str
    message: str


class AnthropicError(BaseModel):
    type: Literal["error"]
    error: AnthropicErrorBody


async def answer_messages(served: Served, wanted: MessagesRequest, http: HttpRequest) -> Response:
    """Returns the answer to a conversation, whole or as a stream. Raises: Refused, ClientLeft."""
    served.check_messages(len(wanted.messages))
    tools = None
    if wanted.tools and not (wanted.tool_choice and wanted.tool_choice.type == "none"):
        tools = [_tool(tool) for tool in wanted.tools]
    thinks = served.thinking if wanted.thinking is None else wanted.thinking.type != "disabled"
    settings = {"enable_thinking": thinks}
    prompt = await served.tokenised(chat_tokens, _turns(wanted), tools, settings)
    names = ("temperature", "top_p", "top_k")
    given = {name: value for name in names if (value := getattr(wanted, name)) is not None}
    sampling = Sampling(**{"temperature": served.temperature} | given, seed=seed_of(None))
    request = Request(
        prompt,
        wanted.max_tokens,
        lambda event: None,
        sampling,
        list(wanted.stop_sequences or []),
        served.adapter_of(wanted.model, wanted.adapter),
    )
    message = _Message(wanted.model, len(prompt), AnswerParts(served.tokenizer, prompt, tools))
    answers = Answers(served.engine, [request])
    if wanted.stream:
        return EventStream(message.streamed(answers), answers.close)
    try:
        return JSONResponse(await unless_left(http, message.whole(answers)))
    finally:
        answers.close()


class _Message:
    """One answer: blocks of thoughts, of words, and of tool calls, in the order in which they come."""

    def __init__(self, model: str, num_prompt: int, parts: AnswerParts):
        self.id, self.model, self.num_prompt, self.parts = f"msg_{uuid.uuid4().hex}", model, num_prompt, parts
        self.blocks: list[dict[str, Any]] = []
        self.calls = False

    async def whole(self, answers: Answers) -> dict[str, Any]:
        """Returns the body of the answer. Raises: Refused for one that could not be finished."""
        end = None
        async for _, event in answers:
            if isinstance(event, Failure):
                raise Refused(event.message, "failed", event.status)
            for kind, value in _in_order(self._said(event)):
                self._add(kind, value)
            end = event
        return self._body(self.blocks) | {
            "stop_reason": self._reason(end),
            "stop_sequence": end.stopped_by,
            "usage": _usage(end),
        }

    async def streamed(self, answers: Answers) -> AsyncIterator[str]:
        usage = {"input_tokens": self.num_prompt, "output_tokens": 0}
        start = self._body([]) | {"stop_reason": None, "stop_sequence": None, "usage": usage}
        yield _event("message_start", message=start)
        async for _, event in answers:
            if isinstance(event, Failure):
                yield data(error_body(event.message, event.status), "error")
                return
            for kind, value in _in_order(self._said(event)):
                for text in self._shown(kind, value):
                    yield text
            if isinstance(event, End):
                if self.blocks:
                    yield _event("content_block_stop", index=len(self.blocks) - 1)
                delta = {"stop_reason": self._reason(event), "stop_sequence": event.stopped_by}
                yield _event("message_delta", delta=delta, usage=_usage(event))
                yield _event("message_stop")

    def _said(self, event: Any) -> Said:
        return self.parts.finish() if isinstance(event, End) else self.parts.feed(event.text)

    def _add(self, kind: str, value: Any) -> bool:
        """Adds to the last block or begins one, and then returns True."""
        if kind == "tool_use":
            arguments = _object(value["arguments"])
            self.blocks.append({"type": kind, "id": value["id"], "name": value["name"], "input": arguments})
            self.calls = True
            return True
        field = {"text": "text", "thinking": "thinking"}[kind]
        if self.blocks and self.blocks[-1]["type"] == kind:
            self.blocks[-1][field] += value
            return False
        self.blocks.append({"type": kind, field: value} | ({"signature": ""} if kind == "thinking" else {}))
        return True

    def _shown(self, kind: str, value: Any) -> list[str]:
        events = []
        if self._add(kind, value):
            place = len(self.blocks) - 1
            if place:
                events.append(_event("content_block_stop", index=place - 1))
            empty = {"text": "", "thinking": "", "input": {}}
            block = {name: empty.get(name, held) for name, held in self.blocks[-1].items()}
            block["type"] = kind
            events.append(_event("content_block_start", index=place, content_block=block))
        deltas = {
            "text": ("text_delta", "text"),
            "thinking": ("thinking_delta", "thinking"),
            "tool_use": ("input_json_delta", "partial_json"),
        }
        name, field = deltas[kind]
        text = json.dumps(_object(value["arguments"])) if kind == "tool_use" else value
        delta = {"type": name, field: text}
        return [*events, _event("content_block_delta", index=len(self.blocks) - 1, delta=delta)]

    def _body(self, blocks: list[dict]) -> dict[str, Any]:
        return {"id": self.id, "type": "message", "role": "assistant", "model": self.model, "content": blocks}

    def _reason(self, end: End) -> str:
        if end.reason == "length":
            return "max_tokens"
        if end.stopped_by is not None:
            return "stop_sequence"
        return "tool_use" if self.calls else "end_turn"


def _in_order(said: Said) -> list[tuple[str, Any]]:
    words = [("thinking", said.reasoning), ("text", said.content)]
    return [(kind, text) for kind, text in words if text] + [("tool_use", call) for call in said.calls]


def _object(arguments: str) -> dict[str, Any]:
    try:
        value = json.loads(arguments)
    except ValueError:
        value = arguments
    return value if isinstance(value, dict) else {"value": value}


def _usage(end: End) -> dict[str, int]:
    return {
        "input_tokens": end.prompt_tokens - end.cached_tokens,
        "output_tokens": end.completion_tokens,
        "cache_read_input_tokens": end.cached_tokens,
    }


def _event(name: str, **content: Any) -> str:
    return data({"type": name, **content}, name)


def _tool(tool: AnthropicTool) -> dict[str, Any]:
    function = {"name": tool.name, "parameters": tool.input_schema}
    if tool.description:
        function["description"] = tool.description
    return {"type": "function", "function": function}


def _turns(wanted: MessagesRequest) -> list[dict[str, Any]]:
    """Returns the conversation as OpenAI has it."""
    turns: list[dict[str, Any]] = []
    if wanted.system:
        turns.append({"role": "system", "content": _text(wanted.system)})
    for turn in wanted.messages:
        if isinstance(turn.content, str):
            turns.append({"role": turn.role, "content": turn.content})
            continue
        for block in turn.content:
            if isinstance(block, ToolResultBlock):
                content = _text(block.content or "")
                turns.append({"role": "tool", "tool_call_id": block.tool_use_id, "content": content})
        text = "".join(block.text for block in turn.content if isinstance(block, TextBlock))
        thoughts = "".join(block.thinking for block in turn.content if isinstance(block, ThinkingBlock))
        calls = [_call(block) for block in turn.content if isinstance(block, ToolUseBlock)]
        if text or calls or thoughts:
            made: dict[str, Any] = {"role": turn.role, "content": text}
            made |= {"tool_calls": calls} if calls else {}
            turns.append(made | ({"reasoning_content": thoughts} if thoughts else {}))
    return turns


def _call(block: ToolUseBlock) -> dict[str, Any]:
    function = {"name": block.name, "arguments": json.dumps(block.input)}
    return {"type": "function", "id": block.id, "function": function}


def _text(content: Any) -> str:
    return content if isinstance(content, str) else "\n".join(block.text for block in content)


_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


def error_body(message: str, status: int) -> dict[str, Any]:
    """Returns an error in Anthropic's form."""
    shown = message.encode("utf-8", "backslashreplace").decode()
    return {"type": "error", "error": {"type": _TYPES.get(status, "api_error"), "message": shown}}
