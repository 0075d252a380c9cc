"""`mlxft chat`: a conversation in the terminal, on the engine that serves."""

import queue
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Optional

from mlxft.config import compose
from mlxft.config.keys import nearest
from mlxft.config.schema import ChatConfig
from mlxft.errors import EXIT_DONE, InputError
from mlxft.models.resolve import resolve
from mlxft.serving.engine import Engine, Limits, load_engine
from mlxft.serving.prompts import chat_tokens
from mlxft.serving.requests import Failure, Piece, Refused, Request
from mlxft.serving.sampling import Sampling, seed_of
from mlxft.serving.text import AnswerParts

_HELP = """\
/adapter NAME   answer with that adapter from here on; none: the base
/adapters       what is mounted
/mount NAME FOLDER, /unmount NAME
/reset          forget the conversation
/quit           end (or Ctrl-D); Ctrl-C ends an answer"""


def main(overrides: list[str]) -> int:
    """Talks until the input ends and returns the exit code. Raises: InputError."""
    composed = compose(overrides, command="chat")
    config, cfg = composed.config, composed.own
    for path in [*config.adapter.starts, *cfg.adapters.values()]:
        if not Path(path).expanduser().is_dir():
            raise InputError(f"there is no adapter folder {path}")
    folder = resolve(config.model.path, config.model.revision)
    limits = Limits(max_concurrent=1, max_queue=0)
    engine = load_engine(
        folder, config.model.dtype, limits, cfg.any_template, config.adapter.any_base
    ).start()
    try:
        for name, path in cfg.adapters.items():
            engine.mount(name, [path])
        current = None
        if config.adapter.starts:
            current = Path(config.adapter.starts[0]).expanduser().resolve().name
            engine.mount(current, config.adapter.starts, config.adapter.init_weights)
        Conversation(engine, cfg, current).run()
    finally:
        engine.stop()
    return EXIT_DONE


@dataclass
class Conversation:
    """Turns so far, and the adapter that answers."""

    engine: Engine
    cfg: ChatConfig
    adapter: Optional[str] = None
    turns: list[dict[str, str]] = field(default_factory=list)

    def run(self) -> None:
        """Reads lines and answers each, until there are no more."""
        from rich.console import Console

        self.console = Console(highlight=False)
        self.is_terminal = sys.stdin.isatty() and self.console.is_terminal
        if self.is_terminal:
            import readline  # noqa: F401  (lines can be edited)

            self.console.print("/help says what there is beside talking.", style="dim")
        self._reset()
        while (line := self._read()) is not None:
            if line.startswith("/"):
                if not self._command(line):
                    return
            elif line:
                self._talk(line)

    def _read(self) -> Optional[str]:
        prompt = f"{self.adapter or 'base'}> " if self.is_terminal else ""
        while True:
            try:
                return input(prompt).strip()
            except EOFError:
                return None
            except KeyboardInterrupt:
                self.console.print("\n/quit ends", style="dim")

    def _reset(self) -> None:
        self.turns = [] if self.cfg.system is None else [{"role": "system", "content": self.cfg.system}]

    def _command(self, line: str) -> bool:
        """Does what the line says; False ends the conversation."""
        name, *words = line[1:].split() or [""]
        takes = {"adapter": 1, "adapters": 0, "mount": 2, "unmount": 1, "reset": 0, "help": 0, "quit": 0}
        if name not in takes:
            near = nearest(name, takes) if name else None
            self._say(f"there is no /{name}" + (f"; did you mean /{near}?" if near else "; see /help"))
        elif len(words) != takes[name]:
            self._say(_HELP)
        elif name == "quit":
            return False
        else:
            try:
                getattr(self, f"_do_{name}")(*words)
            except InputError as error:
                self._say(str(error))
        return True

    def _do_help(self) -> None:
        self._say(_HELP)

    def _do_reset(self) -> None:
        self._reset()
        self._say("forgotten")

    def _do_adapter(self, name: str) -> None:
        if name == "none":
            self.adapter = None
        elif self.engine.residents.get(name) is None:
            return self._say(f"there is no adapter {name}; {self._mounted()}")
        else:
            self.adapter = name
        self._say(f"{self.adapter or 'the base'} answers")

    def _do_adapters(self) -> None:
        self._say(self._mounted())

    def _do_mount(self, name: str, folder: str) -> None:
        self.engine.mount(name, [folder])
        self._say(self._mounted())

    def _do_unmount(self, name: str) -> None:
        if not self.engine.unmount(name):
            return self._say(f"there is no adapter {name}; {self._mounted()}")
        self.adapter = None if self.adapter == name else self.adapter
        self._say(self._mounted())

    def _mounted(self) -> str:
        names = [resident.name for resident in self.engine.residents.listed()]
        return f"mounted: {', '.join(names) or 'none'}"

    def _say(self, text: str) -> None:
        self.console.print(text, style="dim", markup=False)

    def _talk(self, line: str) -> None:
        turns = [*self.turns, {"role": "user", "content": line}]
        try:
            prompt = chat_tokens(self.engine.tokenizer, turns, None, {"enable_thinking": self.cfg.thinking})
            answer = self._shown(prompt)
        except Refused as error:
            return self._say(str(error))
        self.turns = [*turns, {"role": "assistant", "content": answer}]

    def _shown(self, prompt: list[int]) -> str:
        """Prints an answer as it comes, thoughts dimmed, and returns its words."""
        parts, answer = AnswerParts(self.engine.tokenizer, prompt, None), ""
        for event in self._events(prompt):
            if isinstance(event, Failure):
                raise Refused(event.message, "failed", event.status)
            said = parts.feed(event.text) if isinstance(event, Piece) else parts.finish()
            if said.reasoning:
                self.console.print(said.reasoning, style="dim italic", end="", markup=False)
            self.console.print(said.content, end="", markup=False, soft_wrap=True)
            answer += said.content
        self.console.print()
        return answer

    def _events(self, prompt: list[int]) -> Iterator[Any]:
        """Yields the answer's events; Ctrl-C ends it early."""
        events: queue.SimpleQueue = queue.SimpleQueue()
        cfg = self.cfg
        room = max(self.engine.context - len(prompt), 1)
        sampling = Sampling(temperature=cfg.temperature, top_p=cfg.top_p, seed=seed_of(cfg.seed))
        request = Request(prompt, min(cfg.max_tokens, room), events.put, sampling, adapter=self.adapter)
        self.engine.submit(request)
        try:
            while isinstance(event := events.get(), Piece):
                yield event
            yield event
        except KeyboardInterrupt:
            self.engine.cancel(request)
            self._say("\n(ended)")
