"""`trainer.dry_run`: what a step on the longest batch takes."""

import json

from tests.runs import train


def test_a_dry_run_takes_the_longest_batch_once_and_leaves_nothing(model, data, here, caplog):
    caplog.set_level("INFO", "mlxft")
    result = train(model, data, here / "run", "trainer.dry_run=true", "data.batch_size=1")
    longest = max(line["positions"] for line in lengths_of(data))
    assert result.status == "dry_run" and not (here / "run").exists()
    said = next(text for text in caplog.messages if text.startswith("dry run: "))
    assert f"(1 row of {longest} positions" in said and "a peak of " in said and "loss 5." in said


def lengths_of(data):
    """Returns what each row of tokens sends through the model: all but its last token."""
    return [{"positions": len(json.loads(line)["input_ids"]) - 1} for line in data.read_text().splitlines()]
