"""The definition of this server as a provider for the coding agent Pi."""

from typing import Any

from mlxft.config.composition import Composed
from mlxft.models.load import load_tokenizer, num_positions
from mlxft.models.resolve import resolve

_MAX_TOKENS = 8192
_CONTEXT = 32768  # of a model that does not say what it was made for


def definition(composed: Composed) -> dict[str, Any]:
    """Returns what to put into Pi's models.json; the model is not loaded. Raises: InputError.

    The model is called `local` whichever is served. Its input is text: told otherwise Pi would send parts
    that a template of text renders as nothing.
    """
    config, server = composed.config, composed.own.server
    folder = resolve(config.model.path, config.model.revision)
    tokenizer = load_tokenizer(folder)
    context = num_positions(folder) or _CONTEXT
    compat: dict[str, Any] = {"supportsDeveloperRole": False, "supportsStore": False}
    if tokenizer.has_thinking:
        compat["thinkingFormat"] = "qwen-chat-template"
    model = {
        "id": "local",
        "name": server.name or config.model.path,
        "reasoning": bool(tokenizer.has_thinking),
        "input": ["text"],
        "contextWindow": context,
        "maxTokens": min(_MAX_TOKENS, context),
        "cost": {"input": 0, "output": 0, "cacheRead": 0, "cacheWrite": 0},
        "compat": compat,
    }
    host = f"[{server.host}]" if ":" in server.host else server.host
    provider = {
        "baseUrl": f"http://{host}:{server.port}/v1",
        "api": "openai-completions",
        "apiKey": server.api_key or "mlxft",
        "models": [model],
    }
    return {"providers": {"mlxft": provider}}
