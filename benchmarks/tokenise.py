"""Rows of chat tokenised a second, and the memory that takes, against mlx-lm's loader on the same rows.

    python benchmarks/tokenise.py --data FILE.jsonl [--model ID] [--rows 100000] [--workers auto]

mlx-lm          mlx_lm.tuner.datasets: ChatDataset in a CacheDataset, every row asked for once
mlx-lm masked   the same with mask_prompt, which tells prompt and last answer apart
mlxft           load_examples with a mask of every answer, nothing kept from before
mlxft again     the same once more: the rows as they are kept on disk

--data: rows of messages, for instance Alpaca's; they are repeated up to --rows, each time with another number
in the question and the answer's words turned round at another place, so that no text comes twice. Each way
runs in a process of its own. Time is from opening the file to the last row; the tokenizer is there before.
CPU seconds are those of the process and its workers together: on cores that others use too they tell more.
Memory is the process's largest resident size beyond what it was before, with that of its workers.
"""

import argparse
import json
import os
import random
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

WAYS = ("mlx-lm", "mlx-lm masked", "mlxft", "mlxft again")
UNIT = 1 if sys.platform == "darwin" else 1024  # of ru_maxrss, in bytes


def write_rows(source: str, number: int, path: Path) -> None:
    rows = [json.loads(line)["messages"] for line in open(source, encoding="utf-8")]
    draw = random.Random(0)
    with path.open("w", encoding="utf-8") as file:
        for index in range(number):
            messages = [dict(message) for message in rows[index % len(rows)]]
            messages[0]["content"] += f" ({draw.randrange(10**9)})"
            words = messages[-1]["content"].split(" ")
            turn = draw.randrange(len(words))
            messages[-1]["content"] = " ".join(words[turn:] + words[:turn])
            file.write(json.dumps({"messages": messages}, ensure_ascii=False) + "\n")


def by_mlx_lm(path: str, tokenizer, masked: bool) -> tuple[int, int]:
    from mlx_lm.tuner.datasets import CacheDataset, ChatDataset

    with open(path, encoding="utf-8") as file:
        rows = [json.loads(line) for line in file]
    made = CacheDataset(ChatDataset(rows, tokenizer, mask_prompt=masked))
    return len(made), sum(len(made[place][0]) for place in range(len(made)))


def by_mlxft(path: str, tokenizer, vocabulary: int, workers: str) -> tuple[int, int]:
    from mlxft.config.schema import DataConfig
    from mlxft.data.load import load_examples

    number = workers if workers == "auto" else int(workers)
    settings = DataConfig(max_length=1 << 20, cache=True, num_workers=number)
    rows, report = load_examples(path, settings, tokenizer, vocabulary)
    return len(rows), report.num_tokens


def measure(way: str, path: str, model: str, workers: str) -> dict:
    import mlxft  # noqa: F401  first: MLX binds to the BLAS it finds when it is imported
    from mlxft.models.load import load_tokenizer, vocabulary_size
    from mlxft.models.resolve import resolve

    folder = resolve(model)
    tokenizer, vocabulary = load_tokenizer(folder), vocabulary_size(folder)
    before, cpu = peak_bytes(), cpu_seconds()
    began = time.perf_counter()
    if way.startswith("mlx-lm"):
        num_rows, num_tokens = by_mlx_lm(path, tokenizer, way.endswith("masked"))
    else:
        num_rows, num_tokens = by_mlxft(path, tokenizer, vocabulary, workers)
    seconds = time.perf_counter() - began
    used = {"seconds": seconds, "cpu": cpu_seconds() - cpu, "bytes": peak_bytes() - before}
    return {"rows": num_rows, "tokens": num_tokens, **used}


def cpu_seconds() -> float:
    """Returns the seconds of CPU that the process and the children it has waited for have used."""
    return sum(os.times()[:4])


def peak_bytes() -> int:
    """Returns the process's largest resident size, and that of its largest child for each core.

    Linux counts into a child's what it was forked from, so this may be more than there was.
    """
    own = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    child = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    return (own + child * len(os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else [0])) * UNIT


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--data", required=True)
    parser.add_argument("--model", default="HuggingFaceTB/SmolLM2-135M-Instruct")
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--workers", default="auto")
    parser.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.way:
        print(json.dumps(measure(options.way, options.data, options.model, options.workers)))
        return
    with tempfile.TemporaryDirectory() as place:
        path = Path(place) / "rows.jsonl"
        write_rows(options.data, options.rows, path)
        print(f"{options.rows:,} rows, {path.stat().st_size / 1e6:,.0f} MB", flush=True)
        first = None
        for way in WAYS:
            given = ["--data", path, "--model", options.model, "--workers", options.workers, "--way", way]
            done = subprocess.run(
                [sys.executable, __file__, *map(str, given)],
                env=os.environ | {"XDG_CACHE_HOME": place},
                stdout=subprocess.PIPE,
                text=True,
                check=True,
            )
            found = json.loads(done.stdout.splitlines()[-1])
            first = first or found["seconds"]
            print(
                f"{way:<14}{found['rows'] / found['seconds']:>10,.0f} rows/s {found['seconds']:>8.1f} s "
                f"({found['cpu']:.1f} of CPU) {first / found['seconds']:>7.1f} times mlx-lm "
                f"{found['bytes'] / 1e6:>8,.0f} MB, {found['tokens']:,} tokens",
                flush=True,
            )


if __name__ == "__main__":
    main()
