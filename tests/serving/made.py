"""What tests of serving share: servers as processes, engines, a model that calls a tool."""

import json
import queue
import re
import signal
import subprocess
import threading
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim

from mlxft.models import load
from mlxft.serving.engine import Engine
from mlxft.serving.requests import Piece, Request
from tests.command import MLXFT, environment
from tests.tiny_models import CHAT_TEMPLATE, make_model

TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather in a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rom"}}\n</tool_call>'

# One that mlx-lm takes for a family whose calls are JSON. What the tools are makes no difference to it.
TOOL_TEMPLATE = (
    "{% if tools %}<|im_start|>system\ntools<|im_end|>\n{% endif %}"
    + CHAT_TEMPLATE.replace(
        "message['content'] +",
        "message['content'] + ('<tool_call>' + message.tool_calls[0].function.name + '</tool_call>' "
        "if message.tool_calls else '') +",
    )
    + "{% for tool_call in [] %}<tool_call>{{ tool_call.name }}{% endfor %}"
)


@dataclass
class Asked:
    """An engine's answer. logprobs: of its tokens."""

    text: str
    ids: list[int]
    logprobs: list[float]
    end: object


def ask(engine: Engine, *wanted: dict) -> list[Asked]:
    """Submits requests together, with these fields over usual ones, and returns their answers."""
    queues = [queue.Queue() for _ in wanted]
    usual = {"prompt": list(range(70, 90)), "max_tokens": 16, "num_top": 0}
    requests = [Request(**usual | {"deliver": q.put} | w) for w, q in zip(wanted, queues, strict=True)]
    engine.submit(*requests)
    answers = []
    for events in queues:
        text, tokens = "", []
        while isinstance(event := events.get(timeout=60), Piece):
            text, tokens = text + event.text, tokens + event.tokens
        answers.append(Asked(text, [t.id for t in tokens], [t.logprob for t in tokens], event))
    return answers


@dataclass
class Server:
    """A running `mlxft serve`. said: its lines on standard error so far."""

    process: subprocess.Popen
    url: str
    said: list[str]

    def numbers(self) -> dict[str, float]:
        """Returns /metrics by name, labels included."""
        lines = httpx.get(f"{self.url}/metrics").text.splitlines()
        pairs = (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
        return {name: float(value) for name, value in pairs}

    def stop(self, number: int = signal.SIGTERM, timeout: float = 60) -> int:
        self.process.send_signal(number)
        return self.process.wait(timeout)


@contextmanager
def serving(model: Path, *overrides: str):
    """Gives a server of the model on a port of its own; it is ended afterwards, whatever happens."""
    command = [*MLXFT, "serve", f"model.path={model}", "server.port=0", *overrides]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment())
    said: list[str] = []
    try:
        for line in process.stderr:
            said.append(line)
            if found := re.search(r"on (http://\S+)/v1", line):
                break
        else:
            raise AssertionError("".join(said))
        threading.Thread(target=lambda: said.extend(process.stderr), daemon=True).start()
        yield Server(process, found[1], said)
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()


def make_caller(folder: Path) -> Path:
    """Writes a tiny model that learned by heart to call the tool when it is asked about the weather."""
    make_model(folder, "llama")
    (folder / "chat_template.jinja").write_text(TOOL_TEMPLATE)
    model, tokenizer = load(str(folder))
    question = [{"role": "user", "content": "weather?"}]
    prompt = tokenizer.apply_chat_template(question, tools=[TOOL], add_generation_prompt=True)
    answer = tokenizer.encode(CALL) + [tokenizer.eos_token_id]
    tokens, first = mx.array([prompt + answer]), len(prompt)

    def loss(model):
        logits = model(tokens[:, :-1])[:, first - 1 :]
        return nn.losses.cross_entropy(logits, tokens[:, first:], reduction="mean")

    optimizer, step = optim.Adam(3e-3), nn.value_and_grad(model, loss)
    for _ in range(150):
        value, gradients = step(model)
        optimizer.update(model, gradients)
        mx.eval(model.parameters(), optimizer.state)
        if value.item() < 0.03:
            break
    assert value.item() < 0.05
    model.save_weights(str(folder / "model.safetensors"))
    return folder


def events_of(text: str) -> list[dict]:
    """Returns the data of server-sent events, without the last, [DONE]."""
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]
