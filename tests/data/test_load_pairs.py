"""From files to pairs and to labelled answers: real tokenizers, cutting, and the report."""

import numpy as np
import pytest

from mlxft.config.schema import DataConfig
from mlxft.data.load import load_pairs, load_unpaired
from mlxft.errors import InputError


def pairs(source, tokenizer=None, vocab_size=1000, **settings):
    return load_pairs(source, DataConfig(**settings), tokenizer, vocab_size)


def unpaired(source, tokenizer=None, vocab_size=1000, **settings):
    return load_unpaired(source, DataConfig(**settings), tokenizer, vocab_size)


def turn(content, role="assistant", **more):
    return {"role": role, "content": content} | more


QUESTION = turn("one?", "user")
ENDS = {
    "chatml": "<|im_end|>",
    "default_system": "<|im_end|>",
    "headers": "<|eot|>",
    "model_role": "</turn>",
    "thinking": "<|im_end|>",
    "opens_thinking": "<|stop|>",
    "marked": "<|im_end|>",
    "marked_wide": "<|im_end|>",
    "tools": "<|im_end|>",
    "two_prompts": "<|end|>",
    "two_ends": "<|end|></s>",
}


@pytest.mark.parametrize("template", ENDS)
def test_both_answers_of_a_pair_follow_one_prompt_as_the_template_writes_it(
    write_rows, make_tokenizer, trained_text, template
):
    tokenizer = make_tokenizer(template)
    prompt = [QUESTION, turn("First."), turn("two?", "user")]
    path = write_rows([{"prompt": prompt, "chosen": [turn("Yes, so.")], "rejected": [turn("Yes, no.")]}])
    (pair,), report = pairs(path, tokenizer)
    sides = ((pair.chosen, pair.chosen_mask, "Yes, so."), (pair.rejected, pair.rejected_mask, "Yes, no."))
    for answer, mask, said in sides:
        own = tokenizer.apply_chat_template([*prompt, turn(said)], tokenize=True, return_dict=False)
        assert np.concatenate([pair.prompt, answer]).tolist() == own
        assert trained_text(tokenizer, answer, mask) == [said + ENDS[template]]
        assert mask[0]  # so that the prompt takes in all that comes before the answers
    assert (report.format, report.kind, report.num_identical) == ("preference", "pairs", 0)


def test_the_newline_after_the_end_token_is_not_trained(write_rows, make_tokenizer):
    tokenizer = make_tokenizer("chatml")
    path = write_rows([{"prompt": [QUESTION], "chosen": "Yes.", "rejected": "No."}])
    (pair,), _ = pairs(path, tokenizer)
    assert tokenizer.decode(pair.chosen[-2:]) == "<|im_end|>\n"
    assert pair.chosen_mask.tolist() == [True] * (len(pair.chosen) - 1) + [False]


def test_an_answer_of_one_token_is_trained(write_rows, make_tokenizer, trained_text):
    tokenizer = make_tokenizer("unclosed")
    path = write_rows([{"prompt": [QUESTION], "chosen": "a", "rejected": "one two"}])
    (pair,), report = pairs(path, tokenizer)
    assert trained_text(tokenizer, pair.chosen, pair.chosen_mask) == ["a"]
    assert (pair.chosen_mask.sum(), report.num_unended) == (1, 2)


def test_a_think_block_of_one_answer_only_is_trained_in_that_one(write_rows, make_tokenizer, trained_text):
    tokenizer = make_tokenizer("thinking")
    thought = "<think>\nhm\n</think>\n\nYes."
    path = write_rows([{"prompt": [QUESTION], "chosen": thought, "rejected": "No."}])
    (pair,), _ = pairs(path, tokenizer)
    assert tokenizer.decode(pair.prompt).endswith("<|im_start|>assistant\n")
    assert trained_text(tokenizer, pair.chosen, pair.chosen_mask) == [thought + "<|im_end|>"]
    assert trained_text(tokenizer, pair.rejected, pair.rejected_mask) == ["No.<|im_end|>"]
    assert tokenizer.decode(pair.rejected[~pair.rejected_mask]) == "<think>\n\n</think>\n\n\n"


def test_a_call_and_the_answer_after_its_result_are_trained_but_not_the_result(
    write_rows, make_tokenizer, trained_text
):
    tokenizer = make_tokenizer("tools")
    calls = [{"type": "function", "function": {"name": "look", "arguments": {"at": "tea"}}}]
    chosen = [turn("", tool_calls=calls), turn("3 minutes", "tool"), turn("Three.")]
    rejected = [turn("I can't tell.")]
    tools = [{"type": "function", "function": {"name": "look"}}]
    path = write_rows([{"prompt": [QUESTION], "chosen": chosen, "rejected": rejected, "tools": tools}])
    (pair,), _ = pairs(path, tokenizer)
    call = '<call>{"name": "look", "arguments": {"at": "tea"}}</call><|im_end|>'
    assert tokenizer.decode(pair.prompt).startswith("<|im_start|>system\nTools: ")
    assert trained_text(tokenizer, pair.chosen, pair.chosen_mask) == [call, "Three.<|im_end|>"]
    last, _ = pairs(path, tokenizer, train_on="last_assistant")
    assert trained_text(tokenizer, last[0].chosen, last[0].chosen_mask) == ["Three.<|im_end|>"]
    assert np.array_equal(last[0].prompt, pair.prompt)


def test_pairs_of_text_end_with_an_end_of_sequence(write_rows, make_tokenizer, trained_text):
    tokenizer = make_tokenizer("chatml", adds_bos=True)  # its chat template is not used on text
    path = write_rows([{"prompt": "hello", "chosen": " there", "rejected": " again", "system": "tea"}])
    (pair,), _ = pairs(path, tokenizer)
    assert tokenizer.decode(pair.prompt) == "<s>tea\n\nhello"
    assert trained_text(tokenizer, pair.chosen, pair.chosen_mask) == [" there</s>"]
    assert trained_text(tokenizer, pair.rejected, pair.rejected_mask) == [" again</s>"]


def test_a_prompt_ends_before_a_token_that_one_answer_joined_to_it(write_rows, make_tokenizer, trained_text):
    tokenizer = make_tokenizer()
    assert tokenizer.tokenize("hello five two") == ["hello", "Ġfive", "Ġtwo"]
    assert tokenizer.tokenize("hello fiveain") == ["hello", "Ġf", "i", "v", "ea", "in"]
    path = write_rows([{"prompt": "hello five", "chosen": " two", "rejected": "ain"}])
    (pair,), _ = pairs(path, tokenizer)
    assert tokenizer.decode(pair.prompt) == "hello"
    assert trained_text(tokenizer, pair.chosen, pair.chosen_mask) == [" two</s>"]
    assert trained_text(tokenizer, pair.rejected, pair.rejected_mask) == ["eain</s>"]
    assert tokenizer.decode(pair.chosen) == " five two</s>"
    assert tokenizer.decode(pair.rejected) == " fiveain</s>"


def test_text_without_a_token_before_the_answer_is_an_error(write_rows, make_tokenizer):
    path = write_rows([{"prompt": "", "chosen": "hello", "rejected": "tea"}])
    with pytest.raises(InputError, match=f"^{path}:1: no token comes before the answer"):
        pairs(path, make_tokenizer())
    (pair,), _ = pairs(path, make_tokenizer(adds_bos=True))
    assert pair.prompt.tolist() == [make_tokenizer().bos_token_id]
    path = write_rows([{"prompt": "", "completion": "hello", "label": True}])
    with pytest.raises(InputError, match=f"^{path}:1: no token comes before the answer"):
        unpaired(path, make_tokenizer())


def test_pairs_of_tokens_stay_as_they_are(write_rows):
    rows = [
        {"prompt_ids": [1, 2], "chosen_ids": [3, 4], "rejected_ids": [5]},
        {"prompt_ids": [1], "chosen_ids": [3], "rejected_ids": [3, 4]},
    ]
    loaded, report = pairs(write_rows(rows))
    assert [pair.prompt.tolist() for pair in loaded] == [[1, 2], [1]]
    assert [pair.chosen.tolist() for pair in loaded] == [[3, 4], [3]]
    assert [pair.rejected.tolist() for pair in loaded] == [[5], [3, 4]]
    assert all(pair.chosen_mask.all() and pair.rejected_mask.all() for pair in loaded)
    assert loaded[0].prompt.dtype == loaded[0].chosen.dtype == np.int32
    assert (report.num_examples, report.num_tokens, report.num_prompt, report.num_supervised) == (2, 9, 3, 6)
    assert (report.max_length, report.median_length) == (4, 3.5)


def test_identical_answers_are_kept_and_counted(write_rows):
    rows = [
        {"prompt_ids": [1], "chosen_ids": [3, 4], "rejected_ids": [3, 4]},
        {"prompt_ids": [1], "chosen_ids": [3, 4, 5], "rejected_ids": [3, 4, 6]},  # the same once cut
        {"prompt_ids": [1], "chosen_ids": [3], "rejected_ids": [4]},
    ]
    path = write_rows(rows)
    loaded, report = pairs(path, max_length=3)
    assert (len(loaded), report.num_identical) == (3, 2)
    assert report.lines() == [
        f"{path}: 3 pairs of tokens, 13 tokens (3 in prompts, counted once a pair), "
        "10 of them trained on (77%)",
        "lengths of a prompt with its longer answer: median 3, longest 3 tokens",
        "cut to 3 tokens (data.max_length): 1 row, which lost the end of the answer (1)",
        "pairs whose chosen and rejected are the same: 2; they teach no preference",
    ]


def test_dropped_pairs_are_counted(write_rows):
    row = {"prompt_ids": [1, 2], "chosen_ids": [3, 4], "rejected_ids": [5]}
    rows = [row, row | {"chosen_ids": [3] * 9}, row | {"rejected_ids": [3] * 9}]
    loaded, report = pairs(write_rows(rows), max_length=6, truncate="drop")
    assert (len(loaded), report.num_rows, report.dropped) == (1, 3, {"longer than data.max_length": 2})


def test_the_prompt_of_a_pair_is_cut_the_same_for_both_and_keeps_bos(write_rows, make_tokenizer):
    tokenizer = make_tokenizer("headers")
    question = turn("one two three four five six seven " * 9, "user")
    path = write_rows([{"prompt": [question], "chosen": "Yes, so it is.", "rejected": "No."}])
    (pair,), report = pairs(path, tokenizer, max_length=30)
    assert report.truncated == {"the left of the prompt": 1}
    assert pair.length == 30
    assert tokenizer.decode(pair.prompt[:1]) == "<s>"
    assert tokenizer.decode(pair.prompt).endswith("assistant<|/head|>\n\n")
    assert tokenizer.decode(pair.chosen) == "Yes, so it is.<|eot|>"
    assert tokenizer.decode(pair.rejected) == "No.<|eot|>"


def test_an_answer_that_cannot_be_encoded_is_named(write_rows, make_tokenizer):
    path = write_rows([{"prompt": [QUESTION], "chosen": "Yes.", "rejected": "No."}])
    with pytest.raises(InputError, match=rf"^{path}:1: chosen: cannot find messages\[1\]"):
        pairs(path, make_tokenizer("silent"))


def test_labelled_answers_are_loaded(write_rows, make_tokenizer, trained_text):
    tokenizer = make_tokenizer("chatml")
    rows = [
        {"prompt": [QUESTION], "completion": [turn("Yes.")], "label": True},
        {"prompt": "one?", "completion": turn("No."), "label": False},
        {"prompt": [QUESTION], "completion": "So.", "label": False},
    ]
    path = write_rows(rows)
    answers, report = unpaired(path, tokenizer)
    said = [trained_text(tokenizer, row.completion, row.completion_mask)[0] for row in answers]
    assert said == ["Yes.<|im_end|>", "No.<|im_end|>", "So.<|im_end|>"]
    assert [row.label for row in answers] == [True, False, False]
    assert len({tokenizer.decode(row.prompt) for row in answers}) == 1
    assert (answers[0].where, report.num_wanted) == (f"{path}:1", 1)
    assert report.lines()[0].endswith("; labelled true: 1, false: 2")


def test_labelled_answers_of_text_and_of_tokens(write_rows, make_tokenizer):
    tokenizer = make_tokenizer()
    (row,), _ = unpaired(write_rows([{"prompt": "hello", "completion": " there", "label": True}]), tokenizer)
    assert (tokenizer.decode(row.prompt), tokenizer.decode(row.completion)) == ("hello", " there</s>")
    (row,), _ = unpaired(write_rows([{"prompt_ids": [1, 2], "completion_ids": [3], "label": False}]))
    assert (row.prompt.tolist(), row.completion.tolist(), row.label) == ([1, 2], [3], False)


@pytest.mark.parametrize("label, shown", [(1, "1"), ("true", '"true"'), (None, "null")])
def test_a_label_that_is_neither_true_nor_false_is_named(write_rows, label, shown):
    path = write_rows([{"prompt": "hello", "completion": "there", "label": label}])
    with pytest.raises(InputError, match=f":1: label is {shown}; it must be true"):
        unpaired(path)


def test_labelled_answers_are_cut_like_other_rows(write_rows):
    rows = [{"prompt_ids": list(range(9)), "completion_ids": [90, 91], "label": True}]
    (row,), report = unpaired(write_rows(rows), max_length=5)
    assert (row.prompt.tolist(), row.completion.tolist()) == ([6, 7, 8], [90, 91])
    assert report.truncated == {"the left of the prompt": 1}
