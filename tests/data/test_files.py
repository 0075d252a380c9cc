"""Rows as they stand in files of every kind, with their places and faults."""

import gzip
import json
import os

import pyarrow as pa
import pytest
from pyarrow import parquet

from mlxft.errors import InputError
from tests.data.reading import read


def rows_of(source, **settings):
    return [(row.values, row.where) for row in read(source, **settings)]


@pytest.fixture
def write(tmp_path):
    """Returns a function (name, text) -> path."""

    def write(name, text):
        path = tmp_path / name
        path.write_text(text, encoding="utf-8", newline="")
        return str(path)

    return write


def refused(path):
    """Returns the path and what is said of it."""
    with pytest.raises(InputError) as caught:
        read(path)
    return path, str(caught.value)


@pytest.mark.parametrize("indent", [None, 2])
def test_a_json_list_has_a_row_an_object(write, indent):
    rows = [{"text": "a, [b]"}, {"text": 'c"]', "more": [1, {"x": None}]}, {"text": "é\u2028"}]
    path = write("rows.json", json.dumps(rows, indent=indent, ensure_ascii=False))
    assert rows_of(path) == [(row, f"{path} row {n}") for n, row in enumerate(rows, start=1)]


def test_a_json_list_is_read_piece_by_piece(write, monkeypatch):
    rows = [{"text": f"né {n} " + "x" * (n % 40)} for n in range(300)]
    path = write("rows.json", "\ufeff \n" + json.dumps(rows, ensure_ascii=False) + "\n")
    monkeypatch.setattr("mlxft.data.files._READ_BYTES", 7)
    assert [values for values, _ in rows_of(path)] == rows


def test_json_lines_in_a_file_that_ends_in_json_are_read_as_lines(write):
    path = write("rows.json", '{"text": "a"}\n{"text": "b"}\n')
    assert [where for _, where in rows_of(path)] == [f"{path}:1", f"{path}:2"]


@pytest.mark.parametrize(
    "text, fault",
    [
        ('[{"text": "a"}, {"text": "b"', "row 2: not JSON"),
        ('[{"text": "a"} {"text": "b"}]', ": not a JSON list: '{' where ',' has to be"),
        ('[{"text": "a"}, "b"]', "row 2: text, not an object"),
        ('[{"text": "a"}, {"text": "b", "text": "c"}]', "row 2: the key 'text' stands twice"),
        ('[{"text": "a"}]\n[{"text": "b"}]', ": more follows the end of the list"),
        ('[{"text": "a"}', ": not a JSON list: the end of the file where ',' has to be"),
        ("[]", ": the file holds no rows"),
    ],
)
def test_a_faulty_json_list_is_named_with_its_row(write, text, fault):
    path, said = refused(write("rows.json", text))
    assert said.startswith(path) and fault in said


def test_a_row_of_csv_has_the_columns_names_and_its_line(write):
    path = write("rows.csv", '\ufeffprompt,completion\r\n007,"a, ""b""\nc"\r\n\r\nNA,TRUE\r\n')
    assert rows_of(path) == [
        ({"prompt": "007", "completion": 'a, "b"\nc'}, f"{path}:2"),
        ({"prompt": "NA", "completion": "TRUE"}, f"{path}:5"),
    ]


def test_what_is_never_text_is_read_as_json_from_csv(write):
    turns = '"[{""role"": ""user"", ""content"": ""a""}]"'
    path = write("rows.csv", f"messages,label\n{turns},True\n[broken,maybe\n")
    first, second = (values for values, _ in rows_of(path))
    assert first == {"messages": [{"role": "user", "content": "a"}], "label": True}
    assert second == {"messages": "[broken", "label": "maybe"}


def test_a_mapped_column_of_csv_is_read_as_what_it_becomes(write):
    path = write("rows.csv", "good,chat\nfalse,[]\n")
    [(values, _)] = rows_of(path, columns={"label": "good", "messages": "chat"})
    assert values == {"label": False, "messages": []}


@pytest.mark.parametrize(
    "text, fault",
    [
        ("prompt,completion\na\n", ":2: 1 values for 2 columns (prompt, completion)"),
        ("prompt,completion\na,b\nc,d,e\n", ":3: 3 values for 2 columns"),
        ("prompt,prompt\na,b\n", ":1: the first line names the columns"),
        ('prompt\n"a', ":2: not CSV"),
        ("prompt\n", ": the file holds no rows"),
    ],
)
def test_faulty_csv_is_named_with_its_line(write, text, fault):
    path, said = refused(write("rows.csv", text))
    assert said.startswith(path + fault)


def test_a_null_of_parquet_is_a_key_that_is_not_there(tmp_path):
    rows = [
        {"messages": [{"role": "user", "content": "a"}], "score": 1.5},
        {"messages": [{"role": "user", "content": "b", "name": "x"}, {"role": "assistant", "content": "c"}]},
    ]
    path = str(tmp_path / "rows.parquet")
    parquet.write_table(pa.Table.from_pylist(rows), path)
    assert rows_of(path) == [(rows[0], f"{path} row 1"), (rows[1], f"{path} row 2")]


@pytest.mark.parametrize(
    "column",
    [
        pa.array([b"\xff\xfe"]).view(pa.string()),
        pa.array([10**18], pa.int64()).cast(pa.timestamp("ms")),
        pa.array([0], pa.timestamp("s", tz="Nowhere/Town")),
    ],
    ids=["not UTF-8", "a year of five digits and more", "an unknown time zone"],
)
def test_a_value_of_parquet_that_is_none_here_is_said(tmp_path, column):
    path = str(tmp_path / "rows.parquet")
    parquet.write_table(pa.table({"text": ["a"], "more": column}), path)
    with pytest.raises(InputError, match="rows.parquet: cannot be read from its first row on"):
        read(path)


def test_a_pipe_is_refused_since_rows_are_read_more_than_once(tmp_path):
    os.mkfifo(tmp_path / "rows.jsonl")
    assert "is a pipe or a device. Save the rows" in refused(str(tmp_path / "rows.jsonl"))[1]


def test_what_is_no_parquet_is_said(write):
    path = write("rows.parquet", "not at all")
    with pytest.raises(InputError, match="rows.parquet: not a Parquet file"):
        read(path)


def test_packed_files_are_unpacked(tmp_path):
    lines, table = tmp_path / "rows.jsonl.gz", tmp_path / "rows.csv.gz"
    lines.write_bytes(gzip.compress(b'{"text": "a"}\n\n{"text": "b"}\n'))
    table.write_bytes(gzip.compress(b"text\nc\n"))
    assert rows_of([str(lines), str(table)]) == [
        ({"text": "a"}, f"{lines}:1"),
        ({"text": "b"}, f"{lines}:3"),
        ({"text": "c"}, f"{table}:2"),
    ]


@pytest.mark.parametrize("cut", [slice(5, None), slice(None, -6)])
def test_a_packed_file_that_is_not_whole_is_said(tmp_path, cut):
    path = tmp_path / "rows.jsonl.gz"
    path.write_bytes(gzip.compress(b'{"text": "a"}\n' * 50)[cut])
    with pytest.raises(InputError, match="rows.jsonl.gz: not a whole gzip file"):
        read(str(path))
