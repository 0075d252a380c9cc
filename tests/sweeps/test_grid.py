"""Which arguments vary, and the runs that they make."""

import pytest

from mlxft.errors import InputError
from mlxft.sweeps.grid import Job, product, take_apart


def test_every_combination_is_a_job_the_last_key_varies_fastest():
    shared, axes = take_apart(["model.path=m", "optimizer.lr=1e-4,3e-4", "+trainer=orpo,sft"])
    assert shared == ["model.path=m"]
    assert [job.arguments for job in product(shared, axes)] == [
        ("model.path=m", "optimizer.lr=0.0001", "+trainer=orpo"),
        ("model.path=m", "optimizer.lr=0.0001", "+trainer=sft"),
        ("model.path=m", "optimizer.lr=0.0003", "+trainer=orpo"),
        ("model.path=m", "optimizer.lr=0.0003", "+trainer=sft"),
    ]


@pytest.mark.parametrize(
    "argument, values",
    [
        ("adapter.rank=range(2,5)", ["2", "3", "4"]),
        ("adapter.rank=choice(8,16)", ["8", "16"]),
        ("optimizer.betas=[0.9,0.99],[0.9,0.95]", ["[0.9,0.99]", "[0.9,0.95]"]),
        ("adapter.targets=[q_proj],[q_proj,v_proj]", ["[q_proj]", "[q_proj,v_proj]"]),
        ("data.train=a.jsonl,b.jsonl", ["a.jsonl", "b.jsonl"]),
        ('model.path="a,b",c', ['"a,b"', "c"]),
    ],
)
def test_hydras_grammar_says_what_varies(argument, values):
    shared, (axis,) = take_apart([argument])
    assert not shared
    assert [text.partition("=")[2] for text in axis.assignments()] == values


@pytest.mark.parametrize(
    "argument",
    [
        "adapter.targets=q_proj,v_proj", "data.train=[a,b]", "optimizer.betas=[0.9,0.99]", "model.path='a,b'",
        "typo", "x=(",
    ],  # fmt: skip
)
def test_what_is_one_value_for_a_single_run_is_one_here(argument):
    assert take_apart([argument]) == ([argument], [])


def test_of_a_key_that_is_given_twice_the_last_counts():
    shared, axes = take_apart(["adapter.rank=2,4", "optimizer.lr=1", "adapter.rank=8", "optimizer.lr=1,2"])
    assert shared == ["adapter.rank=8"] and [axis.name for axis in axes] == ["optimizer.lr"]


def test_an_interval_has_no_list_of_values():
    _, axes = take_apart(["optimizer.lr=interval(1e-5,1e-3)"])
    with pytest.raises(InputError, match=r"optimizer.lr: interval\(\) has no .*sweep.search=optuna"):
        product([], axes)


def test_a_jobs_folder_is_named_for_what_is_special_about_it():
    job = Job(7, (), {"optimizer.lr": "0.00012345678", "data.train": "../a b/c.jsonl", "adapter.rank": "16"})
    assert job.name == "07_lr-0.0001235_train-c.jsonl_rank-16"
    assert len(Job(0, (), {"data.train": "x" * 300}).name) == 80
