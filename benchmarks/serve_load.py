"""A server under load: many streams for a while, clients that vanish, then a signal.

    python benchmarks/serve_load.py MODEL [--streams 32] [--seconds 60] [--leave 20]

Ends with an error if a stream is lost, a place does not come back, memory grows by more than a tenth after
the first quarter, or the signal cuts an answer short.
"""

import argparse
import re
import signal
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
from served import free_port, mlxft_server, question, resident_bytes, running, stream


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--leave", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=48)
    asked = parser.parse_args()
    port = free_port()
    limits = (f"server.max_concurrent={asked.streams}", "server.prompt_cache=0.05")
    with running(mlxft_server(asked.model, port, *limits), port) as process:
        keep_streaming(port, process.pid, asked)
        leave(port, asked.leave)
        stop_under_load(port, process, asked)


def keep_streaming(port: int, pid: int, asked: argparse.Namespace) -> None:
    """Runs as many streams at once as asked for, each followed by the next."""
    until, ended, memory = time.monotonic() + asked.seconds, [], []

    def one_after_the_other(worker: int) -> None:
        number = worker * 100_000
        while time.monotonic() < until:
            ended.append(stream(port, question(number, 20), asked.tokens).tokens)
            number += 1

    with ThreadPoolExecutor(asked.streams) as pool:
        workers = [pool.submit(one_after_the_other, worker) for worker in range(asked.streams)]
        while time.monotonic() < until:
            time.sleep(asked.seconds / 40)
            memory.append(resident_bytes(pid))
        for worker in workers:
            worker.result()  # a lost stream raises here
    settled, most = max(memory[: len(memory) // 4]), max(memory)
    print(f"{len(ended)} streams of {asked.streams} at once, {sum(ended)} tokens, none lost")
    print(f"memory {settled / 1e6:.0f} MB after a quarter of the time, {most / 1e6:.0f} MB at most")
    if most > 1.1 * settled:
        raise SystemExit("memory grows")


def leave(port: int, clients: int) -> None:
    """Begins streams and closes their connections in the middle."""
    body = b'{"prompt": "a long story", "max_tokens": 2000, "stream": true, "temperature": 1}'
    head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    opened = [socket.create_connection(("127.0.0.1", port)) for _ in range(clients)]
    for client in opened:
        client.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
    for client in opened:
        client.recv(1)  # its answer has begun
        client.close()
    began = time.monotonic()
    while active(port):
        if time.monotonic() - began > 30:
            raise SystemExit("places did not come back")
        time.sleep(0.05)
    print(f"{clients} clients left; all places were free {time.monotonic() - began:.1f} s later")


def active(port: int) -> int:
    text = httpx.get(f"http://127.0.0.1:{port}/metrics", timeout=60).text
    numbers = re.findall(r"^mlxft_requests_(?:active|waiting) (\S+)$", text, re.MULTILINE)
    return int(sum(map(float, numbers)))


def stop_under_load(port: int, process, asked: argparse.Namespace) -> None:
    """Sends SIGTERM while all places are taken; every answer has to end."""
    with ThreadPoolExecutor(asked.streams) as pool:
        texts = [question(each, 20) for each in range(asked.streams)]
        streams = [pool.submit(stream, port, text, asked.tokens) for text in texts]
        while active(port) < asked.streams:
            time.sleep(0.02)
        threading.Timer(0.2, process.send_signal, [signal.SIGTERM]).start()
        whole = [each.result() for each in streams]
    code = process.wait(60)
    print(f"SIGTERM: {len(whole)} answers ended whole, exit code {code}")
    if code != 128 + signal.SIGTERM:
        raise SystemExit(f"exit code {code}")


if __name__ == "__main__":
    main()
