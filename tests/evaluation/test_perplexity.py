"""Evaluation against values worked out in numpy from the model's own logits, row by row."""

import json
import math
import os
import pty
import subprocess

import mlx.core as mx
import numpy as np
import pytest

from mlxft.config import compose
from mlxft.data.example import Example
from mlxft.errors import GuardStop
from mlxft.evaluation.command import evaluate_config
from mlxft.evaluation.perplexity import evaluate
from mlxft.layouts.arrange import Arranger
from mlxft.models import load
from mlxft.models.adapters import load_adapter
from mlxft.models.decoder import view
from mlxft.training.objectives.common import HeadPlan
from mlxft.training.objectives.sft import Sft
from mlxft.training.validation import fixed_batches
from tests.command import MLXFT, environment, mlxft
from tests.devices import ON_CPU
from tests.evaluation.made import examples, make_adapter, merged
from tests.runs import write_rows, write_token_rows
from tests.tiny_models import END_ID, FAMILIES, make_model

LENGTHS = (12, 3, 30, 7, 19)
EXACT = 1e-6 if ON_CPU else 1e-4  # float32 against float64


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("model"), "llama")


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    return write_token_rows(tmp_path_factory.mktemp("data") / "rows.jsonl", LENGTHS)


@pytest.fixture(scope="module")
def adapter(folder, tmp_path_factory):
    return make_adapter(tmp_path_factory.mktemp("adapter"), folder)


def losses_of(model, tokens):
    """Returns -log p of tokens[1:] (T - 1,) float64 by the model's own forward over the row alone."""
    logits = np.array(model(mx.array(tokens)[None])[0, :-1].astype(mx.float32), dtype=np.float64)
    highest = logits.max(axis=-1)
    log_sum = highest + np.log(np.exp(logits - highest[:, None]).sum(axis=-1))
    return log_sum - logits[np.arange(len(logits)), tokens[1:]]


def expected(model, rows):
    """Returns (mean, its standard error, number) of the supervised tokens' losses."""
    losses = np.concatenate([losses_of(model, row.tokens)[row.mask[1:]] for row in examples(rows)])
    return losses.mean(), losses.std(ddof=1) / math.sqrt(len(losses)), len(losses)


def configured(folder, data, *overrides):
    composed = compose([f"model.path={folder}", f"data.valid={data}", *overrides], command="eval")
    return evaluate_config(composed.config)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("batch_size", [1, 2, 5])
def test_loss_and_errors_are_those_of_the_models_own_logits(family, batch_size, rows, tmp_path):
    model, _ = load(str(make_model(tmp_path, family)))
    loss, error, tokens = expected(model, rows)
    made = evaluate(view(model), fixed_batches(list(examples(rows)), batch_size), Sft())
    assert made.loss == pytest.approx(loss, rel=EXACT)
    assert made.loss_stderr == pytest.approx(error, rel=10 * EXACT)
    assert made.perplexity == pytest.approx(math.exp(loss), rel=10 * EXACT)
    assert made.perplexity_stderr == pytest.approx(math.exp(loss) * error, rel=10 * EXACT)
    assert made.tokens == tokens


def test_a_chunked_head_gives_the_same_evaluation(folder, rows):
    decoder = view(load(str(folder))[0])
    batches = fixed_batches(list(examples(rows)), 2)
    full, chunked = (
        evaluate(decoder, batches, Sft(plan)) for plan in (HeadPlan("full"), HeadPlan("chunked", 3))
    )
    assert chunked.loss == pytest.approx(full.loss, rel=EXACT)
    assert chunked.loss_stderr == pytest.approx(full.loss_stderr, rel=10 * EXACT)


@pytest.mark.parametrize("arranger", [Arranger("padded", 16), Arranger("packed"), Arranger("packed", 16)])
def test_how_rows_are_forwarded_does_not_change_the_evaluation(arranger, folder, rows):
    decoder = view(load(str(folder))[0])
    batches = fixed_batches(list(examples(rows)), 2)
    plain, other = (evaluate(decoder, batches, Sft(arranger=each)) for each in (Arranger(), arranger))
    assert other.tokens == plain.tokens
    assert other.loss == pytest.approx(plain.loss, rel=EXACT)
    assert other.loss_stderr == pytest.approx(plain.loss_stderr, rel=10 * EXACT)


def test_one_token_has_a_loss_and_no_standard_error(folder):
    model, _ = load(str(folder))
    example = Example(np.array([5, 6], dtype=np.int32), np.array([False, True]), "rows.jsonl:1")
    made = evaluate(view(model), [[example]], Sft())
    assert made.loss == pytest.approx(losses_of(model, example.tokens)[0], rel=EXACT)
    assert (made.loss_stderr, made.perplexity_stderr) == (None, None)


def test_a_loss_that_is_not_finite_is_no_result(folder, rows):
    decoder = view(load(str(folder))[0])
    row = next(examples(rows))
    decoder.decoder.embed_tokens.weight[row.tokens[0].item()] = math.nan
    with pytest.raises(GuardStop, match="loss is not finite: 6 of 6 tokens"):
        evaluate(decoder, [[row]], Sft())


def test_an_adapter_gives_the_loss_of_its_update_in_the_weights(folder, rows, adapter):
    model, _ = load(str(folder))
    base = expected(model, rows)[0]
    load_adapter(model, adapter)
    adapted = expected(merged(folder, model), rows)[0]
    assert abs(adapted - base) > 0.1
    settings = [folder, rows, "data.format=tokens"]
    assert configured(*settings).evaluation.loss == pytest.approx(base, rel=EXACT)
    made = configured(*settings, f"adapter.init_from={adapter}")
    assert made.evaluation.loss == pytest.approx(adapted, rel=10 * EXACT)


def test_long_texts_are_scored_in_windows_and_every_token_once(folder, tmp_path):
    texts = ["It was a dark and stormy night, and the rain fell.", "Short."]
    data = write_rows(tmp_path / "texts.jsonl", [{"text": text} for text in texts])
    model, tokenizer = load(str(folder))
    losses = []
    for text in texts:
        tokens = np.array([*tokenizer.encode(text), END_ID])
        assert len(tokens) == len(text) + 1
        for start in range(0, len(tokens) - 1, 15):  # 16 tokens a window, the first of them only read
            losses.append(losses_of(model, tokens[start : start + 16]))
    made = configured(folder, data, "data.max_length=16", "data.batch_size=3")
    assert made.evaluation.tokens == sum(map(len, texts))  # all but each first, and the end token
    assert made.evaluation.loss == pytest.approx(np.concatenate(losses).mean(), rel=EXACT)
    assert (made.found.rows, made.found.windows) == (2, len(losses))


def test_json_is_one_object_and_alone_on_standard_output(folder, rows, adapter, tmp_path):
    settings = [f"model.path={folder}", f"data.train={rows}", "data.format=tokens"]
    done = mlxft("eval", *settings, f"adapter.init_from={adapter}", "--json", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    printed = json.loads(done.stdout)
    model, _ = load(str(folder))
    load_adapter(model, adapter)
    loss, error, tokens = expected(model, rows)
    assert printed.pop("seconds") > 0
    assert printed == {
        "loss": pytest.approx(loss, rel=EXACT),
        "loss_stderr": pytest.approx(error, rel=10 * EXACT),
        "perplexity": pytest.approx(math.exp(loss), rel=10 * EXACT),
        "perplexity_stderr": pytest.approx(math.exp(loss) * error, rel=10 * EXACT),
        "tokens": tokens,
        "rows": len(LENGTHS),
        "windows": len(LENGTHS),
        "model": str(folder),
        "adapter": str(adapter),
        "data": str(rows),
    }


def test_plain_lines_go_to_a_pipe_and_a_table_to_a_terminal(folder, rows, tmp_path):
    command = ["eval", f"model.path={folder}", f"data.valid={rows}", "data.format=tokens"]
    lines = mlxft(*command, folder=tmp_path).stdout.splitlines()
    assert [line.partition(": ")[0] for line in lines] == [
        "model", "data", "loss", "perplexity", "tokens", "seconds",
    ]  # fmt: skip
    ours, theirs = pty.openpty()
    running = subprocess.Popen(
        [*MLXFT, *command],
        stdout=theirs,
        stderr=subprocess.DEVNULL,
        cwd=tmp_path,
        env=environment(COLUMNS="200"),
    )
    os.close(theirs)
    shown = b""
    while part := _read(ours):
        shown += part
    assert running.wait() == 0
    loss = lines[2].partition(": ")[2]
    assert [row for row in shown.decode().splitlines() if "│" in row and "loss" in row and loss in row]


def _read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 4096)
    except OSError:  # the other end was closed
        return b""


def test_a_malformed_row_ends_the_command_with_exit_code_2_and_its_line(folder, tmp_path):
    data = tmp_path / "rows.jsonl"
    data.write_text('{"input_ids": [5, 6, 7]}\n{"input_ids": [5, 999, 7]}\n')
    done = mlxft("eval", f"model.path={folder}", f"data.valid={data}", "--json", folder=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert f"{data}:2: input_ids[1] is 999" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize(
    "wrong, said",
    [
        ("adapter.init_from=missing", "the adapter folder missing cannot be read"),
        ("data.max_lengths=16", "did you mean data.max_length?"),
        ("optimizer.lr=1", "mlxft eval does not use it"),
    ],
)
def test_wrong_input_ends_the_command_with_exit_code_2(wrong, said, folder, rows, tmp_path):
    done = mlxft(
        "eval", f"model.path={folder}", f"data.valid={rows}", "data.format=tokens", wrong, folder=tmp_path
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert said in done.stderr and "Traceback" not in done.stderr
