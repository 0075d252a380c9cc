"""From a conversation to the tokens that its answer follows, by the model's own chat template."""

import json
from typing import Any, Optional

from jinja2 import TemplateError

from mlxft.serving.requests import Refused

_RESERVED = (
    "messages",
    "conversation",
    "tools",
    "tokenize",
    "add_generation_prompt",
    "return_dict",
    "return_tensors",
    "chat_template",
    "continue_final_message",
    "padding",
    "truncation",
)


def chat_tokens(
    tokenizer: Any, turns: list[dict], tools: Optional[list[dict]], settings: dict[str, Any]
) -> list[int]:
    """Returns the tokens of the conversation and of the beginning of the answer's turn.

    turns: as OpenAI has them, with text as content. settings: of the template, enable_thinking among them.
    Raises: Refused where the template does not take it.
    """
    if not getattr(tokenizer, "has_chat_template", False):
        raise Refused("the model's tokenizer has no chat template; use /v1/completions", "no_chat_template")
    if tools and not tokenizer.has_tool_calling:
        raise Refused("the model's chat template knows no tools", "tools_not_supported", 400, "tools")
    for name in settings:
        if name in _RESERVED:
            raise Refused(
                f"{name} is none of the template's own settings",
                "bad_template_setting",
                400,
                "chat_template_kwargs",
            )
    turns = [_turn(turn) for turn in turns]
    try:
        return list(
            tokenizer.apply_chat_template(turns, tools=tools or None, add_generation_prompt=True, **settings)
        )
    except (TemplateError, TypeError, ValueError, LookupError, AttributeError) as error:
        raise Refused(
            f"the model's chat template does not take the messages: {error}", "bad_messages", 400, "messages"
        ) from None


def text_tokens(tokenizer: Any, text: str) -> list[int]:
    """Returns the tokens of plain text. Raises: Refused for text that is none (lone surrogates)."""
    try:
        return list(tokenizer.encode(text))
    except (UnicodeError, TypeError, ValueError) as error:
        raise Refused(f"the prompt cannot be read as text: {error}", "bad_prompt", 400, "prompt") from None


def _turn(turn: dict) -> dict:
    """Returns a turn as templates take it: no empty fields, arguments as objects, no developer."""
    turn = {name: value for name, value in turn.items() if value is not None}
    if turn["role"] == "developer":
        turn["role"] = "system"
    content = turn.get("content", "")
    if isinstance(content, list):
        content = "".join(part["text"] for part in content)
    turn["content"] = content
    if calls := turn.get("tool_calls"):
        turn["tool_calls"] = [_call(call) for call in calls]
    return turn


def _call(call: dict) -> dict:
    function = dict(call["function"])
    try:
        function["arguments"] = json.loads(function["arguments"])
    except ValueError:
        pass  # a model's own broken call, shown back to it as it was
    return {"type": "function", "function": function} | ({"id": call["id"]} if call.get("id") else {})
