"""From files to examples, with the report of what became of the rows."""

import numpy as np
import pytest

from mlxft.config.schema import DataConfig
from mlxft.data.load import load_examples, load_pairs, load_unpaired
from mlxft.errors import InputError


def chat(question, answer):
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


def load(source, tokenizer=None, vocab_size=1000, **settings):
    return load_examples(source, DataConfig(**settings), tokenizer, vocab_size)


def pairs(source, tokenizer=None, vocab_size=1000, **settings):
    return load_pairs(source, DataConfig(**settings), tokenizer, vocab_size)


def unpaired(source, tokenizer=None, vocab_size=1000, **settings):
    return load_unpaired(source, DataConfig(**settings), tokenizer, vocab_size)


def test_tokens_need_no_tokenizer_and_stay_as_they_are(write_rows):
    rows = [{"input_ids": [5, 6, 7, 8], "completion_mask": [0, 0, 1, 1]}, {"input_ids": [9, 1]}]
    path = write_rows(rows)
    examples, report = load(path)
    assert [example.tokens.tolist() for example in examples] == [[5, 6, 7, 8], [9, 1]]
    assert [example.mask.tolist() for example in examples] == [[False, False, True, True], [True, True]]
    assert [example.where for example in examples] == [f"{path}:1", f"{path}:2"]
    assert examples[0].tokens.dtype == np.int32
    assert (report.num_rows, report.num_examples, report.num_tokens, report.num_supervised) == (2, 2, 6, 3)
    assert (report.max_length, report.median_length, report.format) == (4, 3.0, "tokens")
    assert (report.dropped, report.truncated) == ({}, {})


def test_each_format_is_loaded(write_rows, make_tokenizer, trained_text):
    tokenizer = make_tokenizer("chatml")
    rows = {
        "messages": (chat("one?", "First."), "First.<|im_end|>"),
        "completion": ({"prompt": "one", "completion": " two"}, " two</s>"),
        "text": ({"text": "one two"}, "one two</s>"),
    }
    for format, (row, trained) in rows.items():
        examples, report = load(write_rows([row]), tokenizer)
        assert report.format == format
        assert trained_text(tokenizer, examples[0].tokens, examples[0].mask) == [trained]


def test_a_prompt_of_messages_trains_only_the_completions_turns(write_rows, make_tokenizer, trained_text):
    turns = chat("one?", "First.")["messages"] + chat("two?", "Second.")["messages"]
    tokenizer = make_tokenizer("chatml")
    path = write_rows([{"prompt": turns[:3], "completion": turns[3:]}])
    for train_on in ("assistant", "last_assistant"):
        examples, _ = load(path, tokenizer, train_on=train_on)
        assert trained_text(tokenizer, examples[0].tokens, examples[0].mask) == ["Second.<|im_end|>"]


def test_columns_of_other_names_are_mapped(write_rows, make_tokenizer):
    path = write_rows([{"question": "one", "answer": " two"}])
    _, report = load(path, make_tokenizer(), columns={"prompt": "question", "completion": "answer"})
    assert report.format == "completion"


def test_a_row_of_another_format_than_the_first_is_an_error(write_rows, make_tokenizer):
    path = write_rows([{"text": "a"}, chat("one?", "First.")])
    with pytest.raises(InputError, match=f"^{path}:2: this row has no 'text', only 'messages'"):
        load(path, make_tokenizer("chatml"))


@pytest.mark.parametrize(
    "first, second, words",
    [
        (
            {"prompt": "a", "completion": "b"},
            {"prompt": "a", "completion": "b", "label": False},
            r"an answer with a label \('prompt', 'completion', 'label'\), and the set's first row, .*:1, is "
            r"a text to learn \('prompt', 'completion'\)\. Make all rows alike, or write "
            r"data\.format=completion",
        ),
        (
            {"prompt": "a", "completion": "b", "label": None},
            {"prompt": "a", "completion": "b", "label": True},
            "an answer with a label",
        ),
        ({"text": "a"}, {"text": "a", "chosen": "b", "rejected": "c", "prompt": "d"}, "a pair of answers"),
        ({"text": "a"}, chat("one?", "First.") | {"text": "a"}, r"\('messages'\), and the set's first row"),
    ],
)
def test_keys_of_another_format_in_a_later_row_are_refused_by_file_and_line(
    first, second, words, write_rows, make_tokenizer
):
    """They say what is to be trained on, and would be ignored: the first row says how a set is read."""
    path = write_rows([first, first, second])
    with pytest.raises(InputError, match=f"^{path}:3: this row is .*{words}"):
        load(path, make_tokenizer("chatml"))


def test_a_format_that_is_named_reads_its_own_keys_alone(write_rows, make_tokenizer):
    row = {"prompt": "a", "completion": "b"}
    path = write_rows([row, row | {"label": False}])
    assert len(load(path, make_tokenizer("chatml"), format="completion")[0]) == 2


def test_labels_of_tokens_are_refused_with_the_name_of_the_mask(write_rows):
    rows = [{"input_ids": [1, 2, 3]}, {"input_ids": [1, 2, 3], "labels": [-100, 2, 3]}]
    with pytest.raises(InputError, match="rows.jsonl:2: labels is not read. Give completion_mask"):
        load(write_rows(rows))
    rows[1]["completion_mask"] = [0, 1, 0]
    assert load(write_rows(rows))[0][1].num_supervised == 1


def test_rows_without_a_target_are_dropped_and_counted(write_rows):
    rows = [{"input_ids": [1, 2], "completion_mask": [1, 0]}, {"input_ids": [1, 2, 3]}, {"input_ids": [4]}]
    examples, report = load(write_rows(rows))
    assert [example.tokens.tolist() for example in examples] == [[1, 2, 3]]
    assert report.dropped == {"nothing to train on": 2}
    assert "dropped: 2 rows: nothing to train on (2)" in report.lines()


def test_a_set_without_a_target_is_an_error_that_says_why(write_rows):
    path = write_rows([{"input_ids": [1, 2], "completion_mask": [0, 0]}, {"input_ids": [1, 2, 3, 4]}])
    with pytest.raises(
        InputError,
        match=rf"^{path}: nothing to train on in 2 rows: "
        r"nothing to train on \(1\), longer than data\.max_length \(1\)",
    ):
        load(path, max_length=3, truncate="drop")


def test_what_is_cut_is_counted_by_what_was_lost(write_rows):
    rows = [
        {"input_ids": list(range(40)), "completion_mask": [0] * 30 + [1] * 10},
        {"input_ids": list(range(40)), "completion_mask": [0] * 10 + [1] * 30},
        {"input_ids": list(range(40))},
        {"input_ids": [1, 2, 3]},
    ]
    examples, report = load(write_rows(rows), max_length=20)
    assert report.truncated == {
        "the left of the prompt": 1,
        "the end of the answer": 1,
        "the end of the text": 1,
    }
    assert [example.num_supervised for example in examples] == [10, 19, 19, 2]
    assert any(
        line.startswith("cut to 20 tokens (data.max_length): 3 rows, which lost ") for line in report.lines()
    )


def test_bos_stays_when_the_prompt_is_cut(write_rows, make_tokenizer):
    tokenizer = make_tokenizer("headers")
    path = write_rows([chat("one two three four five six seven " * 9, "First.")])
    examples, report = load(path, tokenizer, max_length=24)
    assert report.truncated == {"the left of the prompt": 1}
    assert tokenizer.decode(examples[0].tokens[:1]) == "<s>"
    assert tokenizer.decode(examples[0].tokens).endswith("assistant<|/head|>\n\nFirst.<|eot|>")


def test_the_report_says_in_sentences_what_happened(write_rows):
    path = write_rows([{"input_ids": [1, 2, 3, 4], "completion_mask": [0, 1, 1, 0]}])
    _, report = load(path)
    assert report.lines() == [
        f"{path}: 1 row of tokens, 4 tokens, 2 of them trained on (50%)",
        "lengths: median 4, longest 4 tokens",
    ]


def test_answers_without_an_end_token_are_reported(write_rows, make_tokenizer):
    _, report = load(write_rows([chat("one?", "First.")]), make_tokenizer("unclosed"))
    assert report.num_unended == 1
    assert any("ends with no token: 1;" in line for line in report.lines())


TOOLS = [{"type": "function", "function": {"name": "look", "description": "Looks.", "parameters": {}}}]


@pytest.mark.parametrize("template, num_unread", [("chatml", 1), ("tools", 0)])
def test_tools_that_a_template_does_not_write_are_reported(write_rows, make_tokenizer, template, num_unread):
    path = write_rows([chat("one?", "First.") | {"tools": TOOLS}, chat("two?", "Second.")])
    _, report = load(path, make_tokenizer(template))
    assert report.num_tools_unread == num_unread
    assert any("does not write: 1;" in line for line in report.lines()) == bool(num_unread)


def test_text_without_a_chats_markup_is_reported_where_the_model_has_a_template(write_rows, make_tokenizer):
    path = write_rows([{"prompt": "one? ", "completion": "First."}])
    assert [load(path, make_tokenizer(name))[1].num_untemplated for name in ("chatml", None)] == [1, 0]


def test_several_files_are_one_set(write_rows):
    paths = [write_rows([{"input_ids": [1, 2]}], "a.jsonl"), write_rows([{"input_ids": [3, 4]}], "b.jsonl")]
    examples, report = load(paths)
    assert [example.where for example in examples] == [f"{path}:1" for path in paths]
    assert report.source == f"{paths[0]} and 1 more"


def test_a_token_beyond_the_models_vocabulary_is_an_error(write_rows, make_tokenizer):
    path = write_rows([{"text": "hello"}])
    with pytest.raises(InputError, match=rf"^{path}:1: the tokenizer gives token \d+, .*ends at 99"):
        load(path, make_tokenizer(), vocab_size=100)
    with pytest.raises(InputError, match=r"input_ids\[0\] is 100; .*from 0 to 99"):
        load(write_rows([{"input_ids": [100, 1]}]), vocab_size=100)


def test_text_without_a_tokenizer_is_an_error(write_rows):
    with pytest.raises(InputError, match=r":1: text needs a tokenizer"):
        load(write_rows([{"text": "hello"}]))


@pytest.mark.parametrize(
    "settings, fault",
    [
        ({"train_on": "user"}, r"^data\.train_on=user: must be one of assistant, last_assistant, all"),
        ({"truncate": "left"}, r"^data\.truncate=left: "),
        ({"format": "chat"}, r"^data\.format=chat: "),
        ({"max_length": 0}, r"^data\.max_length=0: "),
        ({"columns": {"txt": "text"}}, r"^data\.columns\.txt: "),
        ({"columns": {"prompt": "q"}}, r"^data\.columns\.prompt: .*columns are: input_ids"),
    ],
)
def test_settings_that_make_no_sense_are_named(write_rows, settings, fault):
    with pytest.raises(InputError, match=fault):
        load(write_rows([{"input_ids": [1, 2]}]), **settings)


ROWS = {
    "sft": {"prompt": "a", "completion": "b"},
    "dpo": {"prompt": "a", "chosen": "b", "rejected": "c"},
    "kto": {"prompt": "a", "completion": "b", "label": True},
}


@pytest.mark.parametrize("given", ROWS)
@pytest.mark.parametrize("objective, loads", [("sft", load), ("dpo", pairs), ("kto", unpaired)])
def test_rows_of_another_objective_are_refused_and_name_theirs(
    write_rows, make_tokenizer, given, objective, loads
):
    path = write_rows([ROWS[given]])
    if given == objective:
        assert len(loads(path, make_tokenizer())[0]) == 1
        return
    fault = rf"^{path}:1: this row is .*for trainer\.objective={given}.* Rows for {objective}.* have "
    with pytest.raises(InputError, match=fault):
        loads(path, make_tokenizer())


def test_the_chosen_answers_can_be_learnt_by_mapping_them(write_rows, make_tokenizer, trained_text):
    tokenizer = make_tokenizer("chatml")
    turns = chat("one?", "Yes.")["messages"]
    path = write_rows([{"prompt": turns[:1], "chosen": turns[1:], "rejected": turns[1:]}])
    (example,), report = load(path, tokenizer, columns={"completion": "chosen"})
    assert report.format == "completion"
    assert trained_text(tokenizer, example.tokens, example.mask) == ["Yes.<|im_end|>"]


def test_answers_are_compared_without_training_on_prompts(write_rows):
    path = write_rows([{"prompt_ids": [1], "chosen_ids": [2], "rejected_ids": [3]}])
    with pytest.raises(InputError, match=r"^data\.train_on=all: objectives that compare answers"):
        pairs(path, train_on="all")


def test_the_data_side_loads_without_mlx():
    import subprocess
    import sys

    code = (
        "import sys, mlxft.data.load, mlxft.data.batches, mlxft.data.template\n"
        "print([name for name in ('mlx', 'mlx.core', 'datasets', 'transformers') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "[]", done.stderr


FAULTY = [
    "no row",
    {"input_ids": [1, 2]},
    {"input_ids": [1, 99]},
    {"input_ids": [3, 4]},
    {"ids": [1]},
    {"input_ids": []},
    '{"input_ids": [1], "input_ids": [2]}',
    {"input_ids": [5, 6], "completion_mask": [1]},
    {"prompt_ids": [1], "chosen_ids": [2], "rejected_ids": [3]},
]


def test_faulty_rows_are_skipped_counted_and_named_where_that_is_asked_for(write_rows):
    path = write_rows(FAULTY)
    examples, report = load(path, vocab_size=50, on_bad_row="skip")
    assert [example.where for example in examples] == [f"{path}:2", f"{path}:4"]
    assert (report.num_rows, report.num_skipped) == (9, 7)
    assert list(report.skipped_at) == [f"{path}:{line}" for line in (1, 3, 5, 6, 7, 8, 9)]
    lines = report.lines()
    first = lines.index("faulty and passed over (data.on_bad_row): 7 rows")
    assert lines[first + 1].startswith(f"  {path}:1: not JSON")
    assert lines[first + 6] == "  ... and 2 more"


def test_the_first_faulty_row_ends_it_otherwise(write_rows):
    with pytest.raises(InputError, match="rows.jsonl:2: this row has no 'input_ids'"):
        load(write_rows([{"input_ids": [1, 2]}, *FAULTY[4:]]), vocab_size=50)


def test_rows_a_template_refuses_are_skipped_too(write_rows, make_tokenizer):
    turns = chat("one?", "Yes.")["messages"]
    path = write_rows([chat("one?", "Yes."), {"messages": turns[::-1]}, chat("two?", "No.")])
    examples, report = load(path, make_tokenizer("model_role"), on_bad_row="skip")
    assert [example.where for example in examples] == [f"{path}:1", f"{path}:3"]
    assert "Turns must alternate" in report.skipped_at[f"{path}:2"]


def test_faulty_pairs_and_csv_lines_are_skipped_too(write_rows, tmp_path):
    path = write_rows([{"prompt_ids": [1], "chosen_ids": [2], "rejected_ids": [n]} for n in (3, 99, 4)])
    made, report = pairs(path, vocab_size=50, on_bad_row="skip")
    assert [pair.where for pair in made] == [f"{path}:1", f"{path}:3"] and report.num_skipped == 1
    table = tmp_path / "rows.csv"
    table.write_text('input_ids\n"[1, 2]"\n[1],[2]\n[7 8]\n"[3, 4]"\n')
    made, report = load(str(table), vocab_size=50, on_bad_row="skip", format="tokens")
    assert [example.where for example in made] == [f"{table}:2", f"{table}:5"] and report.num_skipped == 2


def test_a_set_of_nothing_but_faulty_rows_is_an_error_with_the_first(write_rows):
    path = write_rows([{"input_ids": []}, {"input_ids": [99]}])
    with pytest.raises(InputError, match=r"faulty \(2\).* The first faulty row: .*rows.jsonl:1: input_ids"):
        load(path, vocab_size=50, on_bad_row="skip")
    with pytest.raises(InputError, match="rows.jsonl:1: not JSON"):
        load(write_rows(["no row", "nor this"]), vocab_size=50, on_bad_row="skip")
