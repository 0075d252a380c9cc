"""LoRA training on this machine's CPU: mlxft beside mlx-lm, both by their own commands and defaults.

    python benchmarks/compare_cpu.py [--model FOLDER|ID] [--data ROWS.jsonl] [--steps 4] ...

Both train the same rows, of one length in tokens, with the same batch size, LoRA rank, scale, layers and
number of steps; everything else is each program's default (mlx-lm computes in the model's own bfloat16,
mlxft in float32 through an optimised BLAS). Every token of a row but the first is a target: the tokens
of a step are batch size x (length - 1) for both, and tokens/s counts those. Positions are what went
through the model. (mlx-lm's own figure also counts one target a row that is padding.)
A step's time is the time between two lines of progress, so the first step, with loading and
compilation, does not count. Memory is the largest resident set of the whole process.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from mlxft.resources import bundled_data

MLX_LM_SCALE = 20.0  # mlx-lm's default; mlxft's alpha is rank x scale
MLX_LM_STEP = re.compile(r"^.*\d [▼▲]", re.MULTILINE)  # the loss, and which way it went


@dataclass(frozen=True)
class Setting:
    """What both programs are given. length: tokens of every row, its end token included."""

    model: Path
    length: int
    batch_size: int
    steps: int
    rank: int
    layers: int

    @property
    def tokens_a_step(self) -> int:
        return self.batch_size * (self.length - 1)


@dataclass(frozen=True)
class Measured:
    """One program's figures. parameters: how many it trained; positions: forwarded, padding included."""

    name: str
    seconds_a_step: float
    positions_a_step: int
    peak_bytes: int
    parameters: int


def main() -> int:
    options = parse()
    if (load := os.getloadavg()[0]) > 0.5:
        print(f"other programs are running (load {load:.1f}): these figures will not be the machine's own")
    from mlxft.models.resolve import resolve

    sizes = (options.length, options.batch_size, options.steps, options.rank, options.layers)
    setting = Setting(resolve(options.model), *sizes)
    with tempfile.TemporaryDirectory(prefix="compare-cpu-") as folder:
        rows = cut_rows(setting, options.data)
        (Path(folder) / "train.jsonl").write_text("".join(json.dumps({"text": row}) + "\n" for row in rows))
        theirs = train_with_mlx_lm(setting, Path(folder))
        ours = train_with_mlxft(setting, Path(folder))
    if ours.parameters != theirs.parameters:
        sys.exit(f"not comparable: mlx-lm trained {theirs.parameters} parameters, mlxft {ours.parameters}")
    return report(setting, theirs, ours, options.at_least)


def parse() -> argparse.Namespace:
    about = {"description": __doc__, "formatter_class": argparse.RawDescriptionHelpFormatter}
    parser = argparse.ArgumentParser(**about)
    model, data = "HuggingFaceTB/SmolLM2-135M-Instruct", bundled_data("pebble.jsonl")
    parser.add_argument("--model", default=model, help="a folder or a hub id")
    parser.add_argument("--data", type=Path, default=data, help="JSON lines with text or messages")
    parser.add_argument("--length", type=int, default=256, help="tokens of a row: the data is cut to it")
    parser.add_argument("--batch-size", type=int, default=4, help="4 is the default of both programs")
    parser.add_argument("--steps", type=int, default=4, help="the first one is not counted")
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--layers", type=int, default=16, help="adapted, from the last: mlx-lm's default")
    parser.add_argument("--at-least", type=float, default=0.0, help="exit 1 if the ratio is lower")
    options = parser.parse_args()
    if options.steps < 2:
        parser.error("--steps must be 2 or more: the first step is not counted")
    return options


def cut_rows(setting: Setting, data: Path) -> list[str]:
    """Returns a batch's worth of texts a step, each `length` tokens with what both programs add to it.

    The texts of `data` are joined and cut by tokens. A piece that would be tokenised otherwise when it
    stands alone is left out; too few pieces are used again.
    """
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(setting.model)

    def encode(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False)

    size = setting.length - len(tokenizer.encode("")) - 1  # a first token, for some models, and the end's
    stream = encode("\n".join(map(text_of, data.read_text(encoding="utf-8").splitlines())))
    pieces = [stream[start : start + size] for start in range(0, len(stream) - size + 1, size)]
    texts = [tokenizer.decode(piece) for piece in pieces]
    kept = [text for text, piece in zip(texts, pieces, strict=True) if encode(text) == piece]
    if not kept:
        sys.exit(f"{data} has fewer than {size} tokens: give more rows, or a smaller --length")
    wanted = setting.batch_size * setting.steps
    return (kept * (wanted // len(kept) + 1))[:wanted]


def text_of(line: str) -> str:
    row = json.loads(line)
    return row["text"] if "text" in row else "\n".join(message["content"] for message in row["messages"])


def train_with_mlx_lm(setting: Setting, folder: Path) -> Measured:
    config = folder / "mlx_lm.yaml"
    lora = {"rank": setting.rank, "dropout": 0.0, "scale": MLX_LM_SCALE}
    config.write_text(json.dumps({"lora_parameters": lora}))  # JSON is YAML
    log, adapter = folder / "mlx_lm.log", folder / "mlx_lm_adapter"
    command = [sys.executable, "-m", "mlx_lm", "lora", "--train", "--config", str(config)]
    command += ["--model", str(setting.model), "--data", str(folder), "--adapter-path", str(adapter)]
    command += ["--iters", str(setting.steps), "--batch-size", str(setting.batch_size)]
    command += ["--num-layers", str(setting.layers), "--steps-per-report", "1"]
    seconds, peak_bytes = measure(command, log, lambda: len(MLX_LM_STEP.findall(log.read_text())))
    positions = setting.batch_size * 32 * -(-setting.length // 32)  # mlx-lm pads rows to a multiple of 32
    return Measured("mlx-lm", seconds, positions, peak_bytes, num_parameters(adapter))


def train_with_mlxft(setting: Setting, folder: Path) -> Measured:
    run = folder / "mlxft_run"
    metrics = run / "metrics.jsonl"
    command = [sys.executable, "-m", "mlxft", "train", f"model.path={setting.model}", f"run.dir={run}"]
    command += [f"data.train={folder / 'train.jsonl'}", "data.format=text"]
    command += [f"data.batch_size={setting.batch_size}", f"trainer.max_steps={setting.steps}"]
    command += [f"adapter.rank={setting.rank}", f"adapter.alpha={setting.rank * MLX_LM_SCALE}"]
    command += [f"adapter.layers=last {setting.layers}"]

    def records() -> list[dict]:
        lines = metrics.read_text().splitlines() if metrics.exists() else []
        return [record for record in map(json.loads, lines) if record["kind"] == "train"]

    seconds, peak_bytes = measure(command, folder / "mlxft.log", lambda: len(records()))
    counted = {record["tokens"] for record in records()}
    if counted != {setting.tokens_a_step}:
        sys.exit(f"not comparable: mlxft counted {counted} tokens a step, not {setting.tokens_a_step}")
    return Measured("mlxft", seconds, records()[-1]["positions"], peak_bytes, num_parameters(run / "adapter"))


def measure(command: list[str], log: Path, num_steps: Callable[[], int]) -> tuple[float, int]:
    """Runs a training, looks 50 times a second how many steps it has reported; returns seconds, bytes."""
    reported_at: list[float] = []
    with open(log, "w") as output:
        environment = os.environ | {"PYTHONUNBUFFERED": "1"}
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=environment)
        ended = 0
        while not ended:
            time.sleep(0.02)
            ended, status, usage = os.wait4(process.pid, os.WNOHANG)
            reported_at += [time.perf_counter()] * (num_steps() - len(reported_at))
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode or len(reported_at) < 2:
        sys.exit(f"{' '.join(command)}\nfailed (exit {process.returncode}):\n{log.read_text()[-4000:]}")
    seconds = (reported_at[-1] - reported_at[0]) / (len(reported_at) - 1)
    return seconds, usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def num_parameters(adapter: Path) -> int:
    from safetensors import safe_open

    with safe_open(adapter / "adapters.safetensors", "numpy") as tensors:
        return sum(tensors.get_tensor(name).size for name in tensors.keys())


def report(setting: Setting, theirs: Measured, ours: Measured, at_least: float) -> int:
    ratio = theirs.seconds_a_step / ours.seconds_a_step
    print(
        f"{setting.model.name}, LoRA rank {setting.rank} on the last {setting.layers} layers "
        f"({ours.parameters:,} parameters), {setting.batch_size} rows of {setting.length} tokens a step, "
        f"{setting.tokens_a_step} supervised; {setting.steps - 1} steps timed, {os.cpu_count()} cores\n"
    )
    print("| trainer | s a step | positions a step | tokens/s | peak memory |\n|---|---|---|---|---|")
    for one in (theirs, ours):
        speed = setting.tokens_a_step / one.seconds_a_step
        peak = f"{one.peak_bytes / 1e9:.2f} GB"
        print(f"| {one.name} | {one.seconds_a_step:.2f} | {one.positions_a_step} | {speed:,.0f} | {peak} |")
    print(f"\nmlxft is {ratio:.1f} times as fast")
    return 0 if ratio >= at_least else 1


if __name__ == "__main__":
    sys.exit(main())
