"""Tokenised rows kept on disk: the same rows, made anew whenever anything they depend on has changed."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest

from mlxft.config.schema import DataConfig
from mlxft.data import cache
from mlxft.data.fingerprint import rows_digest
from mlxft.data.load import load_examples, load_pairs, load_unpaired
from mlxft.errors import InputError
from tests.command import environment

CHATS = [
    {
        "messages": [
            {"role": "user", "content": f"q {n}?"},
            {"role": "assistant", "content": "yes " * (n % 9 + 1)},
        ]
    }
    for n in range(40)
]


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    """The folder of the entries."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "mlxft" / "data"


def load(path, tokenizer, load=load_examples, **settings):
    return load(path, DataConfig(**{"cache": True, "num_workers": 0} | settings), tokenizer, 1000)


def entries(place):
    return sorted(path.name for path in place.iterdir()) if place.exists() else []


def same(one, other):
    assert [row.where for row in one] == [row.where for row in other]
    assert rows_digest(one) == rows_digest(other)
    assert [row.num_supervised for row in one] == [row.num_supervised for row in other]
    for name in ("num_tokens", "length", "num_supervised"):
        assert getattr(one, name).tolist() == getattr(other, name).tolist()


def test_rows_and_report_are_the_same_as_without(write_rows, make_tokenizer, place):
    path, tokenizer = write_rows(CHATS), make_tokenizer("chatml")
    plain, said = load(path, tokenizer, cache=False, max_length=40)
    assert entries(place) == []
    for _ in range(2):
        rows, report = load(path, tokenizer, max_length=40)
        same(rows, plain)
        assert report == said and report.truncated and len(entries(place)) == 2
    assert rows[0].tokens.dtype == np.int32 and rows[0].mask.dtype == bool


@pytest.mark.parametrize("kind", [load_pairs, load_unpaired])
def test_pairs_and_labelled_answers_are_kept_too(write_rows, place, kind):
    answers = {"chosen_ids": [2] * 3, "rejected_ids": [3, 2]}
    if kind is load_unpaired:
        answers = {"completion_ids": [2] * 4, "label": True}
    path = write_rows([{"prompt_ids": [1, n]} | answers for n in range(5)])
    plain, said = load(path, None, kind, cache=False)
    for _ in range(2):
        kept, report = load(path, None, kind)
        same(kept, plain)
        assert report == said
        assert kept.num_wanted == plain.num_wanted and kept.num_prompt == plain.num_prompt


def test_what_is_kept_is_taken_and_not_made_again(write_rows, make_tokenizer, place, caplog):
    path, tokenizer = write_rows(CHATS), make_tokenizer("chatml")
    load(path, tokenizer)
    with caplog.at_level("INFO", "mlxft"):
        load(path, tokenizer)
    assert f"tokenised rows as kept in {place}" in caplog.text
    assert len(entries(place)) == 2


def test_a_changed_file_is_noticed_even_with_the_same_size_and_time(write_rows, make_tokenizer):
    path, tokenizer = write_rows([{"text": "hello"}]), make_tokenizer()
    before = os.stat(path)
    (row,), _ = load(path, tokenizer)
    write_rows([{"text": "there"}])
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert os.stat(path).st_size == before.st_size
    (other,), _ = load(path, tokenizer)
    assert tokenizer.decode(other.tokens) == "there</s>" != tokenizer.decode(row.tokens)


def test_a_file_under_another_name_is_kept_once_and_told_by_its_name(write_rows, make_tokenizer, place):
    tokenizer = make_tokenizer("chatml")
    load(write_rows(CHATS, "one.jsonl"), tokenizer)
    path = write_rows(CHATS, "two.jsonl")
    rows, report = load(path, tokenizer)
    assert rows[3].where == f"{path}:4" and report.source == path
    assert len(entries(place)) == 2


@pytest.mark.parametrize(
    "change",
    [
        {"max_length": 30},
        {"max_length": 30, "truncate": "drop"},
        {"train_on": "all"},
        {"on_bad_row": "skip"},
        {"columns": {"messages": "messages"}},
    ],
)
def test_other_settings_make_another_entry(write_rows, make_tokenizer, place, change):
    path, tokenizer = write_rows(CHATS), make_tokenizer("chatml")
    load(path, tokenizer)
    load(path, tokenizer, **change)
    assert len(entries(place)) == 4


def test_another_template_or_vocabulary_makes_another_entry(write_rows, make_tokenizer, place):
    path = write_rows(CHATS)
    for count, tokenizer in enumerate(
        [make_tokenizer("chatml"), make_tokenizer("unclosed"), make_tokenizer("chatml", drops="~")], start=1
    ):
        load(path, tokenizer)
        assert len(entries(place)) == 2 * count


def test_a_new_token_makes_another_entry(write_rows, make_tokenizer, place):
    path = write_rows(CHATS)
    (plain, _), tokenizer = load(path, make_tokenizer("chatml")), make_tokenizer("chatml")
    tokenizer.add_tokens(["yes "])
    rows, _ = load(path, tokenizer)
    assert len(entries(place)) == 4 and sum(rows.num_tokens) < sum(plain.num_tokens)
    load(path, tokenizer)
    assert len(entries(place)) == 4


def test_a_template_that_writes_the_date_is_kept_for_the_day(write_rows, make_tokenizer, monkeypatch):
    class Tomorrow(cache.date):
        @classmethod
        def today(cls):
            return cls(2999, 1, 1)

    from tests.data.conftest import TEMPLATES, build

    tokenizer = build("chatml")
    tokenizer.chat_template = "{{ strftime_now('%Y') }}" + TEMPLATES["chatml"]
    path = write_rows(CHATS)
    load(path, tokenizer)
    assert len(entries(cache.folder())) == 2
    monkeypatch.setattr(cache, "date", Tomorrow)
    load(path, tokenizer)
    assert len(entries(cache.folder())) == 4


def damage_rows(place):
    [file] = place.glob("*.arrow")
    raw = bytearray(file.read_bytes())
    raw[len(raw) // 2] ^= 1
    file.write_bytes(raw)


def cut_rows(place):
    [file] = place.glob("*.arrow")
    file.write_bytes(file.read_bytes()[:-100])


def cut_what_is_said(place):
    [file] = place.glob("*.json")
    file.write_bytes(file.read_bytes()[:20])


def lose_what_is_said(place):
    [file] = place.glob("*.json")
    file.unlink()


@pytest.mark.parametrize("harm", [damage_rows, cut_rows, cut_what_is_said, lose_what_is_said])
def test_a_broken_entry_is_made_anew(write_rows, make_tokenizer, place, harm):
    path, tokenizer = write_rows(CHATS), make_tokenizer("chatml")
    plain, _ = load(path, tokenizer, cache=False)
    load(path, tokenizer)
    harm(place)
    rows, _ = load(path, tokenizer)
    same(rows, plain)
    [file] = place.glob("*.json")
    assert json.loads(file.read_bytes())["kind"] == "examples"


def test_an_entry_that_was_not_finished_is_never_seen(write_rows, make_tokenizer, place):
    path = write_rows([*CHATS * 30, "no row"])
    for _ in range(2):
        with pytest.raises(InputError, match=f"^{path}:1201: not JSON"):
            load(path, make_tokenizer("chatml"))
        assert entries(place) == []


def test_a_writer_that_is_killed_leaves_no_entry(write_rows, tmp_path, place):
    path = write_rows([{"input_ids": [1, 2, 3]}] * 3000)
    code = (
        "import os, signal; from mlxft.config.schema import DataConfig; from mlxft.data import chunks, load\n"
        "made = chunks.ChunkEncoder.__call__\n"
        "def dies(self, raws):\n"
        "    if raws[0][0].number > 2000: os.kill(os.getpid(), signal.SIGKILL)\n"
        "    return made(self, raws)\n"
        "chunks.ChunkEncoder.__call__ = dies\n"
        f"load.load_examples({path!r}, DataConfig(cache=True, num_workers=0), None, 9)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], env=environment(), timeout=120)
    assert done.returncode == -9
    assert [name for name in entries(place) if not name.startswith(".")] == []
    rows, _ = load(path, None)
    assert len(rows) == 3000


def test_without_a_place_to_keep_them_rows_are_made_all_the_same(write_rows, place, caplog):
    place.parent.parent.mkdir()
    place.parent.write_text("a file where the folder would be")
    rows, _ = load(write_rows([{"input_ids": [1, 2]}]), None)
    assert len(rows) == 1 and "tokenised rows are not kept for later" in caplog.text


def test_entries_that_were_not_used_for_long_go_when_another_is_written(write_rows, place):
    load(write_rows([{"input_ids": [1, 2]}]), None)
    old = entries(place)
    for name in old:
        os.utime(place / name, (0, 0))
    load(write_rows([{"input_ids": [3, 4]}]), None)
    assert len(entries(place)) == 2 and not set(old) & set(entries(place))


def test_small_sets_are_not_kept_unless_asked(write_rows, place):
    load(write_rows([{"input_ids": [1, 2]}]), None, cache="auto")
    assert entries(place) == []
    load(write_rows([{"input_ids": [1] * 4000}] * 400), None, cache="auto")
    assert len(entries(place)) == 2


def test_skipped_rows_are_told_from_the_entry_too(write_rows):
    path = write_rows([{"input_ids": [1, 2]}, "no row", {"input_ids": []}])
    first, second = (load(path, None, on_bad_row="skip")[1] for _ in range(2))
    assert first == second and second.num_skipped == 2
    assert list(second.skipped_at) == [f"{path}:2", f"{path}:3"]
