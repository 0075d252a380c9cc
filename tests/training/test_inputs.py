"""What a run says of its rows and of the forwards they share, before it trains."""

import json
import shutil

import numpy as np

from tests.runs import column, train, write_rows


def test_a_packed_run_says_how_full_its_batches_are(model, data, here):
    train(model, data, here / "run", "trainer.layout=packed", "data.batch_tokens=40", "trainer.epochs=1")
    tokens, positions = (np.mean(column(here / "run", name)) for name in ("tokens", "positions"))
    assert len(column(here / "run", "tokens")) == 3
    said = (
        f"layout: packed; on average a batch holds 3.3 rows with {tokens:.0f} tokens trained on, "
        f"in {positions:.0f} positions, "
    )
    assert said in (here / "run" / "train.log").read_text()


def test_a_run_with_shared_prompts_says_what_two_forwards_would_take(model, here):
    # With the prompt once 6 + 2 + 1 and 4 + 1 + 2 tokens: 8 a pair; twice, padded, 2 x 8 and 2 x 6: 14.
    rows = [
        {"prompt_ids": [5] * 6, "chosen_ids": [7, 2], "rejected_ids": [2]},
        {"prompt_ids": [5] * 4, "chosen_ids": [2], "rejected_ids": [8, 2]},
    ]
    pairs = write_rows(here / "pairs.jsonl", rows)
    for layout in ("auto", "prefix_shared"):
        chosen = ["trainer.objective=orpo", f"trainer.layout={layout}", "trainer.max_steps=1"]
        train(model, pairs, here / layout, *chosen)
        log = (here / layout / "train.log").read_text()
        said = "prefix_shared; 8 tokens a pair with the prompt forwarded once, 14 in two rows of one length"
        assert log.count(said) == 1


def test_rows_beyond_the_models_positions_are_warned_of(model, here):
    folder = shutil.copytree(model, here / "short")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 8}))
    rows = write_rows(here / "rows.jsonl", [{"input_ids": [5] * size} for size in (8, 9, 12)])
    train(folder, rows, here / "run", "trainer.max_steps=1", "data.format=tokens")
    log = (here / "run" / "train.log").read_text()
    assert "2 of 3 rows are longer than the 8 positions" in log and "the longest has 12 tokens" in log
