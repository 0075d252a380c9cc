"""From decoded text to what a client sees: up to a stop string; thoughts, words and tool calls apart."""

import json
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Optional

from mlx_lm.generate import TextStateMachine, make_text_state_machine


class StopStrings:
    """Lets text through up to the first of some strings; what could become one of them waits."""

    def __init__(self, stops: Sequence[str]):
        self._stops = [stop for stop in stops if stop]
        self._waiting = ""
        self.hit: Optional[str] = None

    def feed(self, text: str) -> str:
        """Returns the text that is safe; sets `hit` when a stop string has come, after which nothing is."""
        if self.hit is not None or not self._stops:
            return "" if self.hit is not None else text
        self._waiting += text
        found = [(place, stop) for stop in self._stops if (place := self._waiting.find(stop)) >= 0]
        if found:
            place, self.hit = min(found, key=lambda each: each[0])
            return self._waiting[:place]
        keep = max((_overlap(self._waiting, stop) for stop in self._stops), default=0)
        place = len(self._waiting) - keep
        safe, self._waiting = self._waiting[:place], self._waiting[place:]
        return safe

    def rest(self) -> str:
        """Returns what waited, at the end of an answer in which no stop string came."""
        text, self._waiting = self._waiting, ""
        return "" if self.hit is not None else text


def _overlap(text: str, stop: str) -> int:
    """Returns how many characters at the end of `text` `stop` begins with."""
    for size in range(min(len(stop) - 1, len(text)), 0, -1):
        if text.endswith(stop[:size]):
            return size
    return 0


@dataclass
class Said:
    """A piece of an answer: words, thoughts, and calls that are complete."""

    content: str = ""
    reasoning: str = ""
    calls: list[dict[str, Any]] = field(default_factory=list)


class AnswerParts:
    """Splits an answer into words, thoughts and tool calls, as the model's family marks them.

    Markup that no call can be read from stays in the words. tools: as the request has them, None for none;
    the values of arguments are read by their schemas.
    """

    def __init__(self, tokenizer: Any, prompt: list[int], tools: Optional[list[dict]]):
        self._tokenizer, self._tools = tokenizer, tools
        initial = "reasoning" if _thinks(tokenizer, prompt) else "normal"
        initial = tokenizer.response_initial_state or initial
        self._state = make_text_state_machine(tokenizer).make_state(initial)
        self._call: Optional[str] = None

    def feed(self, text: str) -> Said:
        said = Said()
        if self._state[0] is None:
            return said
        self._state, segments = TextStateMachine.split(self._state, text)
        for name, piece in segments:
            self._take(name, piece, said)
        return said

    def finish(self) -> Said:
        """Returns what waited at the end of the answer."""
        said = Said()
        self._state, text, name = TextStateMachine.flush(self._state)
        self._take(name, text, said)
        self._close_call(said)
        return said

    def _take(self, name: Optional[str], text: str, said: Said) -> None:
        if name == "tool":
            self._call = (self._call or "") + text
            return
        self._close_call(said)
        if name == "reasoning":
            said.reasoning += text
        else:
            said.content += text

    def _close_call(self, said: Said) -> None:
        if self._call is None:
            return
        text, self._call = self._call, None
        calls = self._parsed(text)
        if calls:
            said.calls += calls
        else:
            said.content += f"{self._tokenizer.tool_call_start}{text}{self._tokenizer.tool_call_end or ''}"

    def _parsed(self, text: str) -> list[dict[str, Any]]:
        """Returns the calls in a family's markup, none where it is broken or no tools were offered."""
        if not self._tools:
            return []
        try:
            parsed = self._tokenizer.tool_parser(text, self._tools)
        except Exception:  # a parser meets whatever a model wrote
            return []
        calls = parsed if isinstance(parsed, list) else [parsed]
        if not all(isinstance(c, dict) and isinstance(c.get("name"), str) for c in calls):
            return []
        return [
            {
                "id": call.get("id") or f"call_{uuid.uuid4().hex[:24]}",
                "name": call["name"],
                "arguments": _json_text(call.get("arguments", {})),
            }
            for call in calls
        ]


def _json_text(arguments: Any) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def _thinks(tokenizer: Any, prompt: list[int]) -> bool:
    """Tells whether the prompt ends within thoughts."""
    if not tokenizer.has_thinking:
        return False
    return tokenizer.rfind_think_start(prompt) > tokenizer.rfind_think_end(prompt)
