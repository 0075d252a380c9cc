"""What the benchmarks of serving share: servers as processes, and streams that are timed."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Iterator

import httpx

WORDS = "river stone lamp harbour winter letter garden engine silver morning candle forest".split()


@dataclass(frozen=True)
class Timed:
    """A stream. first_s: until its first token; total_s: until its end; tokens: of the answer."""

    first_s: float
    total_s: float
    tokens: int


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return taken.getsockname()[1]


@contextmanager
def running(command: list[str], port: int, timeout: float = 300) -> Iterator[subprocess.Popen]:
    """Gives a server's process once /v1/models answers; ends it afterwards."""
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + timeout
        while True:
            try:
                httpx.get(f"http://127.0.0.1:{port}/v1/models", timeout=60)
                break
            except httpx.TransportError:
                if process.poll() is not None or time.monotonic() > deadline:
                    raise SystemExit(f"{' '.join(command)} did not start") from None
                time.sleep(0.2)
        yield process
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
        process.wait()


def mlxft_server(model: str, port: int, *overrides: str) -> list[str]:
    return [sys.executable, "-m", "mlxft", "serve", f"model.path={model}", f"server.port={port}", *overrides]


def question(number: int, words: int) -> str:
    """Returns a prompt that begins like no other: what was computed of earlier ones is of no use."""
    chosen = [WORDS[(number * 7 + place * place + place) % len(WORDS)] for place in range(words)]
    return f"{number} {' '.join(chosen)}"


def stream(port: int, text: str, max_tokens: int, **fields) -> Timed:
    """Asks for one streamed completion of `text` and times it. Raises: RuntimeError if it is not whole."""
    body = {"prompt": f"{text}\n", "max_tokens": max_tokens, "stream": True, "temperature": 0,
            "stream_options": {"include_usage": True}} | fields  # fmt: skip
    began, first, tokens, done = time.perf_counter(), None, 0, False
    url = f"http://127.0.0.1:{port}/v1/completions"
    with httpx.stream("POST", url, json=body, timeout=600) as answer:
        answer.raise_for_status()
        for line in answer.iter_lines():
            if not line.startswith("data: "):
                continue
            if line == "data: [DONE]":
                done = True
                break
            chunk = json.loads(line[6:])
            if first is None and chunk["choices"] and chunk["choices"][0].get("text"):
                first = time.perf_counter() - began
            tokens = (chunk.get("usage") or {}).get("completion_tokens", tokens)
    if not done or first is None or not tokens:
        raise RuntimeError("a stream was not whole")
    return Timed(first, time.perf_counter() - began, tokens)


def resident_bytes(pid: int) -> int:
    """Returns the memory that a process has (Linux)."""
    with open(f"/proc/{pid}/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
