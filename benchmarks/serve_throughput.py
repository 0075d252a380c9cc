"""Tokens per second and time to the first token: `mlxft serve` beside mlx_lm.server, same model and requests.

    python benchmarks/serve_throughput.py MODEL [--streams 1 8] [--tokens 64] [--rounds 3]

The two servers run one after the other in each round; what is printed is the median over the rounds.
"""

import argparse
import statistics
import sys
import time
from concurrent.futures import ThreadPoolExecutor

from served import free_port, mlxft_server, question, running, stream


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--words", type=int, default=60)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dtype", default="auto", help="model.dtype of mlxft serve")
    asked = parser.parse_args()
    results: dict[tuple[str, int], list[tuple[float, float]]] = {}
    for number in range(asked.rounds):
        for name in ("mlxft", "mlx-lm") if number % 2 == 0 else ("mlx-lm", "mlxft"):
            port = free_port()
            with running(command(name, asked, port), port):
                measure(port, 1, asked, -1)  # warm
                for streams in asked.streams:
                    results.setdefault((name, streams), []).append(measure(port, streams, asked, number))
    for (name, streams), measured in sorted(results.items(), key=lambda each: each[0][1]):
        speed, first = (statistics.median(column) for column in zip(*measured, strict=True))
        print(f"{streams:3d} streams  {name:7s} {speed:8.1f} tokens/s  first token {1000 * first:7.1f} ms")


def command(name: str, asked: argparse.Namespace, port: int) -> list[str]:
    if name == "mlxft":
        return mlxft_server(asked.model, port, f"model.dtype={asked.dtype}")
    # mlxft first: its BLAS is for both.
    start = "import mlxft, sys; from mlx_lm.server import main; main()"
    return [sys.executable, "-c", start, "--model", asked.model, "--port", str(port)]


def measure(port: int, streams: int, asked: argparse.Namespace, number: int) -> tuple[float, float]:
    """Returns tokens per second of all streams together, and the median time to the first token."""
    texts = [question((number + 1) * 1000 + streams * 10 + each, asked.words) for each in range(streams)]
    began = time.perf_counter()
    with ThreadPoolExecutor(streams) as pool:
        timed = list(pool.map(lambda text: stream(port, text, asked.tokens), texts))
    seconds = time.perf_counter() - began
    return sum(each.tokens for each in timed) / seconds, statistics.median(each.first_s for each in timed)


if __name__ == "__main__":
    main()
