"""`mlxft generate`: one answer of a model, streamed as it comes.

A question is a user's turn in the model's chat template, or plain text where there is none. A template
that can let the model think first is told not to (`enable_thinking=False`): rows for fine-tuning rarely
hold thoughts, and an answer must not use up its tokens on them. `thinking=true` turns it on.
"""

import logging
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Iterator, Optional

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import GenerationResponse, stream_generate
from mlx_lm.sample_utils import make_sampler

from mlxft.errors import EXIT_DONE, InputError
from mlxft.sizes import written

log = logging.getLogger("mlxft")


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn.

    max_tokens: the answer's length at most. temperature: 0 takes the likeliest token. top_p: the share
    of probability that is drawn from. seed: the same seed draws the same answer.
    """

    max_tokens: int = 256
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0


def main(arguments: list[str]) -> int:
    """Prints the answer on stdout and speeds on stderr; returns the exit code.

    --compare: the base's answer and the adapter's, side by side.

    Raises: InputError for a wrong configuration, model or adapter.
    """
    from mlxft.config import compose
    from mlxft.evaluation.adapted import load_adapted
    from mlxft.models.load import num_positions
    from mlxft.models.new_tokens import load_vocabulary
    from mlxft.models.resolve import resolve

    compares = "--compare" in arguments
    composed = compose([text for text in arguments if text != "--compare"], command="generate")
    wanted = composed.own
    if compares and composed.config.adapter.init_from is None:
        raise InputError("--compare: there is no adapter to compare; give adapter.init_from=FOLDER")
    folder = resolve(composed.config.model.path, composed.config.model.revision)
    vocabulary = load_vocabulary(composed.config, folder)
    tokenizer = vocabulary.tokenizer
    prompt = prompt_tokens(tokenizer, wanted.prompt, wanted.system, wanted.thinking)
    most = num_positions(folder)
    if most is not None and len(prompt) > most:
        log.warning("the prompt has %d tokens; the model was made for %d positions", len(prompt), most)
    model = load_adapted(composed.config, folder, vocabulary.new)
    sampling = Sampling(wanted.max_tokens, wanted.temperature, wanted.top_p, wanted.seed)
    if compares:

        def ask(each: nn.Module) -> str:
            return "".join(part.text for part in stream(each, tokenizer, prompt, sampling)).strip()

        _print_both(*both(model, composed.config, folder, ask))
        return EXIT_DONE
    last = None
    for part in stream(model, tokenizer, prompt, sampling):
        print(part.text, end="", flush=True)
        last = part
    print(flush=True)
    log.info("%s", _speeds(last))
    return EXIT_DONE


def both(adapted: nn.Module, config: Any, folder: Path, ask: Callable[[nn.Module], Any]) -> tuple[Any, Any]:
    """Returns what `ask` gets of the base, and of the model with its adapter.

    config: with the adapter in it. folder: the base's.
    """
    from mlxft.evaluation.adapted import base_of
    from mlxft.models.decoder import view

    made, of_adapted = view(adapted), ask(adapted)
    with base_of(made, config, folder)(made) as base:
        return ask(base.model), of_adapted


def _print_both(base: str, adapted: str) -> None:
    from rich.console import Console
    from rich.table import Table

    if not (sys.stdout and sys.stdout.isatty()):
        print(f"base: {base}\n\nadapter: {adapted}", flush=True)
        return
    table = Table("base", "adapter", show_lines=True)
    table.add_row(base, adapted)
    Console().print(table, markup=False)


def answer(model: nn.Module, tokenizer: Any, question: str, max_tokens: int) -> str:
    """Returns the model's likeliest answer, of at most `max_tokens` tokens."""
    prompt = prompt_tokens(tokenizer, question)
    return "".join(part.text for part in stream(model, tokenizer, prompt, Sampling(max_tokens))).strip()


def stream(
    model: nn.Module, tokenizer: Any, prompt: list[int], sampling: Sampling
) -> Iterator[GenerationResponse]:
    """Yields the answer to `prompt` in pieces of text, the last of them with the reason why it ended."""
    if sampling.temperature > 0:  # the likeliest token needs no chance, and takes none from others
        mx.random.seed(sampling.seed)
    sampler = make_sampler(temp=sampling.temperature, top_p=sampling.top_p)
    yield from stream_generate(model, tokenizer, prompt, max_tokens=sampling.max_tokens, sampler=sampler)


def prompt_tokens(
    tokenizer: Any, question: str, system: Optional[str] = None, thinking: bool = False
) -> list[int]:
    """Returns the tokens that the answer follows: the chat so far and the beginning of the answer's turn.

    Raises: InputError for a system turn where the model's template has no place for one, or there is no
    template; and for a prompt without tokens.
    """
    if getattr(tokenizer, "has_chat_template", False):
        tokens = _chat_tokens(tokenizer, question, system, thinking)
    elif system is not None:
        raise InputError(
            "system: the model's tokenizer has no chat template, so there are no turns. "
            "Write everything into the prompt, or use an instruct model"
        )
    else:
        tokens = tokenizer.encode(question)
    if not tokens:
        raise InputError(f"prompt={question!r} holds no token for this model. Write some text")
    return list(tokens)


def _chat_tokens(tokenizer: Any, question: str, system: Optional[str], thinking: bool) -> list[int]:
    from jinja2 import TemplateError

    turns = [{"role": "user", "content": question}]
    if system is not None:
        turns.insert(0, {"role": "system", "content": system})
    try:
        return tokenizer.apply_chat_template(turns, add_generation_prompt=True, enable_thinking=thinking)
    except TemplateError as error:
        what = "prompt" if system is None else "system"
        raise InputError(f"{what}: the model's chat template does not take it: {error}") from None


def _speeds(last: GenerationResponse) -> str:
    why = "  (max_tokens reached)" if last.finish_reason == "length" else ""
    return (
        f"prompt: {last.prompt_tokens} tokens, {last.prompt_tps:,.0f} tokens/s  "
        f"answer: {last.generation_tokens} tokens, {last.generation_tps:,.1f} tokens/s  "
        f"peak {written(last.peak_memory * 1e9)}{why}"
    )
