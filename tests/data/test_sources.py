"""Reading JSON lines: rows unchanged, places kept, faults named."""

import json
import subprocess
import sys

import pytest

from mlxft.config.schema import DataConfig
from mlxft.data.sources import check_columns_exist, first_row, sets_of
from mlxft.errors import InputError
from tests.command import environment
from tests.data.reading import read


def rows_of(source, columns=None):
    return [(row.values, row.where) for row in read(source, columns=columns or {})]


def test_rows_keep_their_file_and_line(write_rows):
    first = write_rows([{"text": "a"}, "", {"text": "b"}], "first.jsonl")
    second = write_rows([{"text": "c"}], "second.jsonl")
    assert rows_of([first, second]) == [
        ({"text": "a"}, f"{first}:1"),
        ({"text": "b"}, f"{first}:3"),
        ({"text": "c"}, f"{second}:1"),
    ]


def test_rows_of_unlike_keys_and_types_survive_unchanged(write_rows):
    rows = [
        {"messages": [{"role": "user", "content": "a"}], "score": 1},
        {
            "messages": [{"role": "user", "content": "b", "name": "x"}],
            "tools": [{"a": {"b": [1, "two", None]}}],
        },
        {"text": "c", "score": "high", "nested": {"deep": [[], {}, 1.5, True]}},
        {},
    ]
    assert [values for values, _ in rows_of(write_rows(rows))] == rows


def test_the_first_row_is_read_without_the_others(write_rows):
    path = write_rows(["", {"question": "a"}, "this is no row"])
    row = first_row([path, "no such file"], DataConfig(columns={"prompt": "question"}))
    assert (row.values, row.where) == ({"prompt": "a"}, f"{path}:2")
    with pytest.raises(InputError, match="the file holds no rows"):
        first_row(write_rows([""]), DataConfig())


def test_a_line_separator_inside_a_string_is_no_new_line(write_rows):
    assert rows_of(write_rows([{"text": "a\u2028b\u0085c"}, {"text": "d"}]))[0][0] == {
        "text": "a\u2028b\u0085c"
    }


def test_a_byte_order_mark_and_windows_line_ends_are_read(tmp_path):
    path = tmp_path / "windows.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"text": "a"}\r\n\r\n{"text": "b"}\r\n')
    assert rows_of(path) == [({"text": "a"}, f"{path}:1"), ({"text": "b"}, f"{path}:3")]


def test_bundled_data_is_found_by_name():
    values, where = rows_of("bundled:pebble.jsonl")[0]
    assert where == "bundled:pebble.jsonl:1"
    assert "messages" in values


@pytest.mark.parametrize(
    "line, fault",
    [
        ('{"text": "b"', r"not JSON \(.* at character 13\)"),
        ("{'text': 'b'}", r"not JSON \(Expecting property name .* at character 2\)"),
        ("{", "not JSON .*one line.*jq"),
        ('"just text"', "text, not an object"),
        ("3", "a number, not an object"),
        ("null", "null, not an object"),
        ('[{"text": "b"}]', "a JSON list, not an object.*jq"),
        ('{"text": "\\ud83d"}', r"\\ud83d is half of a character"),
        ("[" * 100_000, "not usable JSON"),
    ],
)
def test_a_malformed_line_is_named_with_its_fault(write_rows, line, fault):
    path = write_rows([{"text": "a"}, line])
    with pytest.raises(InputError, match=f"^{path}:2: {fault}"):
        read(path)


def test_a_whole_pair_of_surrogates_is_a_character(write_rows):
    assert rows_of(write_rows(['{"text": "\\ud83e\\udea8"}']))[0][0] == {"text": "\U0001faa8"}


def test_bytes_that_are_not_utf8_are_named(tmp_path):
    path = tmp_path / "latin.jsonl"
    path.write_bytes(b'{"text": "a"}\n{"text": "caf\xe9"}\n')
    with pytest.raises(InputError, match=f"^{path}:2: not UTF-8 .byte 14 of the line is 0xe9"):
        read(path)


@pytest.mark.parametrize("content", ["", "\n \n"])
def test_a_file_without_rows_is_an_error(tmp_path, content):
    path = tmp_path / "empty.jsonl"
    path.write_text(content)
    with pytest.raises(InputError, match=f"^{path}: the file holds no rows"):
        read(path)


def test_an_empty_file_among_others_is_an_error(write_rows):
    with pytest.raises(InputError, match="none.jsonl: the file holds no rows"):
        read([write_rows([{"text": "a"}]), write_rows([], "none.jsonl")])


def test_a_missing_file_a_folder_and_an_unknown_bundle_are_named(tmp_path):
    with pytest.raises(InputError, match="nowhere.jsonl: cannot be read .No such file"):
        read(str(tmp_path / "nowhere.jsonl"))
    with pytest.raises(InputError, match=f"^{tmp_path}: the folder has no file that ends in .jsonl, "):
        read(str(tmp_path))
    with pytest.raises(InputError, match=r"^bundled:peble.jsonl: .*Bundled are: .*pebble\.jsonl"):
        read("bundled:peble.jsonl")


@pytest.mark.parametrize("source", [None, 3, [], ["a.jsonl", 4], {"train": "a.jsonl"}])
def test_what_is_no_file_is_refused(source):
    with pytest.raises(InputError, match="^data: "):
        read(source)


def test_columns_are_read_under_our_names(write_rows):
    path = write_rows([{"question": "a", "answer": "b", "id": 1}, {"question": "c", "text": "d"}])
    assert [values for values, _ in rows_of(path, {"prompt": "question", "completion": "answer"})] == [
        {"prompt": "a", "completion": "b", "id": 1},
        {"prompt": "c", "text": "d"},
    ]


def test_a_mapped_column_wins_over_one_of_our_name(write_rows):
    path = write_rows([{"prompt": "a", "completion": "b"}])
    swapped = rows_of(path, {"prompt": "completion", "completion": "prompt"})
    assert swapped[0][0] == {"prompt": "b", "completion": "a"}
    assert rows_of(path, {"prompt": "completion"})[0][0] == {"prompt": "b"}


def test_a_column_that_no_row_has_is_an_error_that_lists_the_columns(write_rows):
    path = write_rows([{"question": "a"}, {"answer": "b"}])
    with pytest.raises(
        InputError, match=r"data\.columns\.prompt: .*'qestion'.*columns are: question, answer"
    ):
        [rows] = sets_of(path, DataConfig(columns={"prompt": "qestion"}))
        check_columns_exist(rows, rows.parts())


def test_reading_writes_nothing_and_says_nothing_even_without_a_home(write_rows, tmp_path):
    path = write_rows([{"input_ids": [1, 2]}])
    code = (
        "from mlxft.config.schema import DataConfig; from mlxft.data.load import load_examples; "
        f"print([row.where for row in load_examples({path!r}, DataConfig(), None, 9)[0]])"
    )
    nowhere = "/dev/null/home"  # below a file: no folder can be made there
    nowhere = {"HOME": nowhere, "HF_HOME": nowhere + "/hf", "TMPDIR": str(tmp_path)}
    before = sorted(tmp_path.iterdir())
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment(**nowhere), capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout.replace("'", '"'))[0].endswith("rows.jsonl:1")
    assert sorted(tmp_path.iterdir()) == before


def test_a_key_that_stands_twice_is_refused(tmp_path):
    """JSON readers keep the last value and drop the first in silence."""
    path = tmp_path / "rows.jsonl"
    path.write_text('{"text": "a"}\n{"text": "a", "text": "b"}\n')
    with pytest.raises(InputError, match="rows.jsonl:2: the key 'text' stands twice"):
        list(read(str(path)))


def test_a_folder_is_all_the_files_of_rows_in_it_by_name(write_rows, tmp_path):
    (tmp_path / "rows" / "more").mkdir(parents=True)
    write_rows([{"text": "b"}], "rows/b.jsonl")
    write_rows([{"text": "a"}], "rows/a.json")
    write_rows([{"text": "c"}], "rows/more/c.jsonl")
    write_rows([{"text": "d"}], "rows/.hidden.jsonl")
    (tmp_path / "rows" / "README.md").write_text("no rows")
    (tmp_path / "rows" / "d.csv").write_text("text\nd\n")
    folder = f"{tmp_path}/rows"
    assert rows_of(folder) == [
        ({"text": "a"}, f"{folder}/a.json:1"),
        ({"text": "b"}, f"{folder}/b.jsonl:1"),
        ({"text": "d"}, f"{folder}/d.csv:2"),
        ({"text": "c"}, f"{folder}/more/c.jsonl:1"),
    ]


@pytest.fixture
def splits(write_rows, tmp_path):
    """A folder whose files' names tell splits apart."""
    (tmp_path / "rows").mkdir()
    for name in ("train-00001", "train-00002", "valid", "test"):
        write_rows([{"text": name}], f"rows/{name}.jsonl")
    return f"{tmp_path}/rows"


def texts(source, validates=False, **settings):
    [rows] = sets_of(source, DataConfig(**settings), validates)
    return [row.values["text"] for row in rows.rows()]


def test_a_folder_with_splits_gives_the_one_that_is_meant(splits):
    assert texts(splits) == ["train-00001", "train-00002"]
    assert texts(splits, validates=True) == ["valid"]
    assert texts({"path": splits, "split": "test"}) == ["test"]
    assert texts(splits, split="validation") == ["valid"]
    assert texts(splits, validates=True, split="train") == ["valid"]  # data.split is of data.train


def test_a_split_that_a_folder_has_not_is_named_with_those_it_has(splits, write_rows, tmp_path):
    with pytest.raises(InputError, match=r"tell splits apart \(test, train, valid\), and none is dev2"):
        texts(splits, split="dev2")
    (tmp_path / "plain").mkdir()
    write_rows([{"text": "a"}], "plain/trained.jsonl")  # no split's name
    assert texts(f"{tmp_path}/plain") == ["a"]
    with pytest.raises(InputError, match="no file's name says that it is of the split 'train'"):
        texts(f"{tmp_path}/plain", split="train")


def test_files_without_keys_of_their_own_are_one_set_and_others_a_set_each(write_rows):
    one, two = write_rows([{"text": "a"}], "one.jsonl"), write_rows([{"text": "b"}], "two.jsonl")
    assert [each.paths for each in sets_of([one, two], DataConfig())] == [(one, two)]
    mixed = sets_of([one, {"path": two, "weight": 2, "columns": {"text": "t"}}], DataConfig(subset="s"))
    assert [(each.paths, each.weight, each.columns, each.subset) for each in mixed] == [
        ((one,), None, (), "s"),
        ((two,), 2, (("text", "t"),), "s"),
    ]


@pytest.mark.parametrize("entry", [{"weight": 2}, {"path": "a.jsonl", "wieght": 2}, 3])
def test_what_is_no_set_is_refused(entry):
    with pytest.raises(InputError, match="is no set of rows"):
        sets_of(["a.jsonl", entry], DataConfig())
