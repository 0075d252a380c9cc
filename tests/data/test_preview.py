"""`mlxft preview`: rows as training sees them, on screen, in a pipe and in a file."""

import json
import os
import pty

import pytest

from mlxft import cli
from tests.command import ROOT, environment, mlxft
from tests.runs import train, write_rows
from tests.tiny_models import make_model

# A token a byte, and <|im_start|> and <|im_end|> of one each.
CHATS = [
    {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yo."}]},
    {
        "messages": [
            {"role": "user", "content": "And now?"},
            {"role": "assistant", "content": "No."},
            {"role": "user", "content": "Why?"},
            {"role": "assistant", "content": "So."},
        ]
    },
]
PAIRS = [
    {
        "prompt": [{"role": "user", "content": "Is it open?"}],
        "chosen": [{"role": "assistant", "content": "Yes, until six."}],
        "rejected": [{"role": "assistant", "content": "Why?"}],
    }
]
LABELLED = [
    {"prompt": "Open? ", "completion": "Yes.", "label": True},
    {"prompt": "Open? ", "completion": "Why?", "label": False},
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder to be in, with rows, and a model whose weights cannot be read."""
    place = tmp_path_factory.mktemp("preview")
    make_model(place / "model", "llama")
    (place / "model" / "model.safetensors").write_bytes(b"these are no weights")
    for name, rows in (("chats", CHATS), ("pairs", PAIRS), ("labelled", LABELLED)):
        write_rows(place / f"{name}.jsonl", rows)
    return place


@pytest.fixture
def preview(folder, capsys, monkeypatch):
    """Returns a function (file, *overrides) -> standard output of the command, run in this process."""
    monkeypatch.chdir(folder)

    def run(file, *overrides):
        capsys.readouterr()
        assert cli.main(["preview", "model.path=./model", f"data.train={file}", *overrides]) == 0
        return capsys.readouterr().out

    return run


def process(folder, *overrides, **options):
    """Runs the command in a process of its own."""
    return mlxft("preview", "model.path=./model", *overrides, folder=folder, **options)


def test_a_conversation_is_shown_whole_with_its_answers_in_marks_and_no_weights_are_read(folder):
    done = process(folder, "data.train=chats.jsonl")
    # <|im_start|>user\n is 6 tokens, <|im_start|>assistant\n 11, <|im_end|>\n 2, an answer's end 1 of these.
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == (
        "the first 2 rows; ⟦ and ⟧ enclose what is trained on\n"
        "\n"
        "==> chats.jsonl:1 <==  26 tokens, 4 trained on\n"
        "<|im_start|>user\nHi<|im_end|>\n"
        "<|im_start|>assistant\n⟦Yo.<|im_end|>⟧\n"
        "\n"
        "\n"
        "==> chats.jsonl:2 <==  60 tokens, 8 trained on\n"
        "<|im_start|>user\nAnd now?<|im_end|>\n"
        "<|im_start|>assistant\n⟦No.<|im_end|>⟧\n"
        "<|im_start|>user\nWhy?<|im_end|>\n"
        "<|im_start|>assistant\n⟦So.<|im_end|>⟧\n"
        "\n"
        "\n"
        "training rows: chats.jsonl: 2 rows of messages, 86 tokens, 12 of them trained on (14%)\n"
        "training rows: lengths: median 43, longest 60 tokens\n"
    )


def test_a_model_without_weights_is_enough(folder, preview):
    weights = folder / "model" / "model.safetensors"
    there = weights.read_bytes()
    weights.unlink()
    try:
        assert "Yo." in preview("chats.jsonl")
    finally:
        weights.write_bytes(there)


def test_answers_of_a_pair_stand_side_by_side_below_their_prompt(preview):
    shown = preview("pairs.jsonl", "trainer=dpo")
    assert shown.count("Is it open?") == 1
    # Prompt: 6 + 11 + 2 + 11. Answers: 15 and 4 bytes, <|im_end|> trained on, the newline after it not.
    assert (
        "==> pairs.jsonl:1 <==  53 tokens, 21 trained on\n--- prompt, 30 tokens\n<|im_start|>user\n" in shown
    )
    heads, texts = (next(line for line in shown.splitlines() if word in line) for word in ("chosen,", "Yes,"))
    assert [cell.strip() for cell in heads.strip("┃").split("┃")] == [
        "chosen, 17 tokens, 16 trained on",
        "rejected, 6 tokens, 5 trained on",
    ]
    assert [cell.strip() for cell in texts.strip("│").split("│")] == [
        "⟦Yes, until six.<|im_end|>⟧",
        "⟦Why?<|im_end|>⟧",
    ]


def test_orpos_own_loss_on_the_prompt_is_said(preview):
    said = "--- prompt, 30 tokens; orpo trains on it with the chosen answer: loss.nll_scope=full\n"
    assert said in preview("pairs.jsonl", "trainer=orpo")
    assert "--- prompt, 30 tokens\n" in preview("pairs.jsonl", "trainer=orpo", "loss.nll_scope=response")


def test_equal_answers_are_said_to_teach_nothing(preview, folder):
    write_rows(folder / "equal.jsonl", [PAIRS[0] | {"rejected": PAIRS[0]["chosen"]}])
    assert "\nboth answers are the same; they teach no preference\n" in preview("equal.jsonl", "trainer=cpo")


def test_labelled_answers_are_said_to_be_desirable_or_not(preview):
    good, bad = preview("labelled.jsonl", "trainer=kto").split("==> ")[1:]
    assert good.startswith(
        "labelled.jsonl:1 <==  11 tokens, 5 trained on; desirable (label true)\n"
        "--- prompt, 6 tokens\nOpen? \n"
        "--- completion, 5 tokens, 5 trained on\n⟦Yes.<|im_end|>⟧\n"
    )
    assert bad.startswith("labelled.jsonl:2 <==  11 tokens, 5 trained on; undesirable (label false)\n")


def test_the_first_token_of_a_text_is_not_marked_since_nothing_predicts_it(preview, folder):
    write_rows(folder / "texts.jsonl", [{"text": "Hi."}])
    assert "3 trained on\nH⟦i.<|im_end|>⟧\n" in preview("texts.jsonl")


def test_what_was_cut_and_dropped_is_said_with_its_place(preview, folder):
    rows = [
        {"input_ids": list(range(70, 80)), "completion_mask": [0] * 8 + [1] * 2},
        {"input_ids": [70, 71], "completion_mask": [1, 0]},
    ]
    write_rows(folder / "tokens.jsonl", rows)
    shown = preview("tokens.jsonl", "data.format=tokens", "data.max_length=4")
    # Byte b has the id b + 3: 76 to 79 are I to L.
    assert (
        "==> tokens.jsonl:1 <==  4 tokens, 2 trained on\n"
        "cut to fit into data.max_length=4; lost: the left of the prompt\nIJ⟦KL⟧\n"
    ) in shown
    assert "dropped: 1 row: nothing to train on (1)\ndropped: tokens.jsonl:2: nothing to train on\n" in shown


def test_so_many_rows_are_shown_of_the_split_that_is_asked_for(preview):
    shown = preview("chats.jsonl", "preview.rows=1")
    assert shown.startswith("the first row of 2;") and shown.count("==> ") == 1
    shown = preview("pairs.jsonl", "data.valid=chats.jsonl", "preview.split=valid", "preview.rows=9")
    assert shown.startswith("the first 2 rows;") and "==> chats.jsonl:2 <==" in shown
    assert "\nvalidation rows: chats.jsonl: 2 rows of messages" in shown


def test_the_table_of_tokens_has_each_with_its_id_piece_and_text(preview):
    shown = preview("labelled.jsonl", "trainer=kto", "preview.rows=1", "preview.tokens=true")
    table = shown.partition("--- completion, token by token\n")[2]
    cells = [[cell.strip() for cell in line.split("│")[1:-1]] for line in table.splitlines() if "│" in line]
    assert cells == [
        *([str(6 + at), str(ord(byte) + 3), byte, f"'{byte}'", "yes"] for at, byte in enumerate("Yes.")),
        ["10", "2", "<|im_end|>", "'<|im_end|>'", "yes"],
    ]


def test_rows_of_tokens_need_no_tokenizer(folder, preview):
    (folder / "bare").mkdir()
    for name in ("config.json", "model.safetensors"):
        (folder / "bare" / name).write_bytes((folder / "model" / name).read_bytes())
    write_rows(folder / "ids.jsonl", [{"input_ids": [5, 6, 7], "completion_mask": [0, 0, 1]}])
    shown = preview("ids.jsonl", "model.path=./bare", "data.format=tokens", "preview.tokens=true")
    assert "==> ids.jsonl:1 <==  3 tokens, 1 trained on\n5 6⟦ 7⟧\n" in shown
    assert [line.split("│")[1:-1] for line in shown.splitlines() if "yes" in line] == [
        ["     2 ", "  7 ", " yes     "]
    ]


def test_it_reports_what_training_logs(preview, folder, tmp_path):
    make_model(tmp_path / "model", "llama")
    write_rows(folder / "ids.jsonl", [{"input_ids": list(range(5, 5 + size))} for size in (4, 9, 6)])
    packed = ["trainer.layout=packed", "data.batch_tokens=12", "trainer.max_steps=1"]
    shown = preview("ids.jsonl", "data.format=tokens", *packed)
    train(tmp_path / "model", "ids.jsonl", tmp_path / "run", *packed)
    report = shown.splitlines()[-3:]
    assert report[2].startswith("layout: packed; on average a batch holds 1.5 rows with 8 tokens trained on")
    log = (tmp_path / "run" / "train.log").read_text()
    assert all(line in log for line in report)


def test_it_takes_every_key_of_a_training_run_and_refuses_what_training_refuses(preview, folder, capsys):
    assert "⟦" in preview("chats.jsonl", "optimizer=lion", "optimizer.lr=1e-5", "trainer.epochs=3")
    wrong = ["model.path=./model", "data.train=chats.jsonl", "preview.row=1", "trainer.patience=2"]
    assert cli.main(["preview", *wrong, "preview.split=validation", "preview.rows=0"]) == 2
    assert capsys.readouterr().err.splitlines() == [
        "mlxft: the configuration has 4 problems:",
        "  preview.row: there is no such key; did you mean preview.rows?",
        "  preview.split: 'validation' is not known; did you mean valid? there are train, valid",
        "  preview.rows: 0 is out of range; it must be at least 1",
        "  trainer.patience: it needs validation data; give data.valid",
    ]
    assert cli.main(["preview", *wrong[:2], "preview.split=valid"]) == 2
    assert "preview.split: there is no validation data; give data.valid" in capsys.readouterr().err
    assert cli.main(["train", *wrong[:2], "preview.rows=1"]) == 2
    assert "preview.rows: there is no such key" in capsys.readouterr().err


def test_packed_batches_without_room_for_a_row_are_refused_as_by_training(folder, capsys, monkeypatch):
    monkeypatch.chdir(folder)
    packed = ["trainer.layout=packed", "data.batch_tokens=20"]
    assert cli.main(["preview", "model.path=./model", "data.train=chats.jsonl", *packed]) == 2
    assert "data.batch_tokens=20 has no room for the longest row" in capsys.readouterr().err


def test_a_faulty_row_ends_with_2_its_place_and_nothing_shown(folder):
    write_rows(folder / "faulty.jsonl", [CHATS[0], {"messages": "Hi"}])
    done = process(folder, "data.train=faulty.jsonl")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("mlxft: faulty.jsonl:2: messages is text; it must be a list")


def on_a_terminal(folder, **variables):
    """Returns what a terminal is sent."""
    main, terminal = pty.openpty()
    variables = environment(**{"TERM": "xterm-256color"} | variables)
    done = process(folder, "data.train=chats.jsonl", "preview.rows=1", stdout=terminal, env=variables)
    os.close(terminal)
    assert done.returncode == 0, done.stderr
    sent = b""
    try:
        while chunk := os.read(main, 4096):
            sent += chunk
    except OSError:  # Linux says so where everything was read
        pass
    os.close(main)
    return sent.decode()


def test_marks_are_there_in_colour_and_without(folder):
    assert "\x1b[1;32m⟦Yo.<|im_end|>⟧\x1b[0m" in on_a_terminal(folder)
    without = on_a_terminal(folder, NO_COLOR="1")
    assert "⟦Yo.<|im_end|>⟧" in without and "32m" not in without


def test_an_output_without_these_characters_gets_others(folder):
    write_rows(folder / "letters.jsonl", [{"prompt": "é ", "completion": "日"}])
    options = {"env": environment(PYTHONIOENCODING="latin-1"), "encoding": "latin-1"}
    done = process(folder, "data.train=letters.jsonl", **options)
    assert done.returncode == 0, done.stderr
    assert "\né [[\\u65e5<|im_end|>]]\n" in done.stdout


def test_a_reader_that_goes_away_and_a_full_disk_are_no_faults(folder):
    reading, writing = os.pipe()
    os.close(reading)
    done = process(folder, "data.train=chats.jsonl", stdout=writing)
    os.close(writing)
    assert (done.returncode, done.stderr) == (141, "")
    with open("/dev/full", "w") as full:
        done = process(folder, "data.train=chats.jsonl", stdout=full)
    assert done.returncode == 3
    assert "No space left on device; free some space" in done.stderr and done.stderr.count("\n") == 1


def test_a_recipe_is_previewed_by_its_name(preview, folder):
    shown = preview("bundled:shout.jsonl", "+recipe=dpo", "preview.rows=1")
    asked = json.loads((ROOT / "recipes/data/shout.jsonl").read_text().splitlines()[0])["prompt"][0][
        "content"
    ]
    assert "==> bundled:shout.jsonl:1 <==" in shown and asked in shown


def test_of_a_large_set_no_more_is_read_than_is_shown(preview, folder):
    row = json.dumps({"text": "Hi." * 100})
    (folder / "large.jsonl").write_text(f"{row}\n" * 15_000 + "no row\n")
    shown = preview("large.jsonl", "preview.rows=2")
    assert shown.startswith("the first 2 rows; ")
    assert "training rows: the first rows of large.jsonl: 2 texts, 602 tokens, 600 of them" in shown


def test_a_stream_is_previewed_by_its_first_rows(preview):
    stream = ["data.streaming=true", "trainer.max_steps=1"]
    shown = preview("chats.jsonl", "preview.rows=1", *stream)
    assert "the first rows of chats.jsonl: 1 row of messages" in shown


def test_how_often_rows_of_mixed_sets_are_seen_is_said(preview):
    mixed = "[{path:chats.jsonl,weight:3},{path:chats.jsonl}]"
    shown = preview(mixed)
    assert "the first 3 rows of 4;" in shown
    assert "training rows: chats.jsonl: weight 3, 75%: an epoch sees each of its 2 rows 1.5 times" in shown
    assert "training rows: chats.jsonl: weight 1, 25%: an epoch sees 1 of its 2 rows" in shown
