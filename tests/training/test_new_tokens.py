"""New tokens in whole runs: what is trained, what stays, and what later commands know of them."""

import json
import re
import shutil

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten

import mlxft
from mlxft import cli
from mlxft.errors import InputError
from mlxft.models.load import load_model
from mlxft.training.inputs import load_trained
from tests.runs import arrays, column, metrics, same, write_rows
from tests.tiny_models import VOCAB_SIZE, make_model

CALL, RESULT = "<|call|>", "<|result|>"
NAMED = [f'model.new_tokens=["{CALL}"]', f'model.new_special_tokens=["{RESULT}"]']
STEPS = ["adapter.rank=2", "optimizer.lr=1e-2", "trainer.max_steps=3", "trainer.save_every=1"]
STEPS += ["trainer.keep=all"]


def chat(number):
    answer = f"{CALL}look({number}){RESULT}" + "so " * (number % 3)
    asked = {"role": "user", "content": f"Look {CALL} {number}?"}
    return {"messages": [asked, {"role": "assistant", "content": answer}]}


def pair(number):
    prompt = f"Look {CALL} {number}, and then once more {number}? "
    return {"prompt": prompt, "chosen": f"{CALL}look{RESULT}", "rejected": f"no{RESULT}{number}"}


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Tiny models: with a head of its own, tied, with rows to spare; and files of rows."""
    root = tmp_path_factory.mktemp("new")
    make_model(root / "llama", "llama", num_hidden_layers=2)
    make_model(root / "tied", "qwen3", num_hidden_layers=2)
    make_model(root / "padded", "llama", num_hidden_layers=2, vocab_size=320)
    make_model(root / "quantised", "llama", num_hidden_layers=2, quantize=4)
    write_rows(root / "chats.jsonl", [chat(number) for number in range(8)])
    write_rows(root / "pairs.jsonl", [pair(number) for number in range(8)])
    return root


def train(folders, model, run_dir, *overrides, rows="chats", named=NAMED):
    data = folders / f"{rows}.jsonl"
    given = [f"model.path={folders / model}", f"data.train={data}", f"run.dir={run_dir}", *STEPS, *named]
    return mlxft.train([*given, *overrides])


@pytest.mark.parametrize("model", ["llama", "tied", "padded", "quantised"])
def test_only_the_new_rows_of_the_tables_are_trained(folders, model, tmp_path, monkeypatch):
    monkeypatch.setattr("mlxft.models.dequantise._SHARE_OF_MEMORY", 0)  # quantised stays so
    loaded = []

    def watched(*given):
        loaded.append(load_trained(*given))
        return loaded[-1]

    monkeypatch.setattr("mlxft.training.run.load_trained", watched)
    train(folders, model, tmp_path / "run")
    trained = loaded[0][0].model
    base = dict(tree_flatten(load_model(folders / model).parameters()))
    tables = [name for name in ("model.embed_tokens", "lm_head") if f"{name}.weight" in base]
    after = dict(tree_flatten(trained.parameters()))
    for table in tables:
        for name in ("weight", "scales", "biases"):
            if f"{table}.{name}" in base:
                assert mx.array_equal(after[f"{table}.table.{name}"], base[f"{table}.{name}"])
    saved = arrays(tmp_path / "run" / "adapter")
    rows = {name: array for name, array in saved.items() if "lora" not in name}
    assert rows.keys() == {f"{table}.new_rows" for table in tables}
    for name, array in rows.items():
        table = after[name.replace("new_rows", "table.weight")]
        assert array.shape == (2, 64) and array.dtype == mx.float32
        if table.dtype == mx.float32:
            start = table[mx.array([byte + 3 for byte in CALL.encode()])].mean(axis=0)
            assert 1e-3 < mx.abs(array[0] - start).max().item() < 0.1  # three steps of 0.01


@pytest.mark.parametrize("model, objective", [("llama", "sft"), ("tied", "dpo"), ("padded", "orpo")])
def test_every_way_to_run_a_step_gives_the_same(folders, model, objective, tmp_path):
    """A vocabulary that grows; tests/invariance has all the others, with rows to spare."""
    rows = "chats" if objective == "sft" else "pairs"
    ways = [["trainer.gradient=whole", "head.kind=full", "trainer.layout=padded"]]
    shared = "packed" if objective == "sft" else "prefix_shared"
    for gradient in ("checkpoint", "segmented"):
        ways.append([f"trainer.gradient={gradient}", "head.chunk=7", f"trainer.layout={shared}"])
    runs = []
    for number, way in enumerate(ways):
        runs.append(tmp_path / str(number))
        train(folders, model, runs[-1], f"trainer.objective={objective}", *way, rows=rows)
    for other in runs[1:]:
        for name in ("loss", "grad_norm"):
            assert np.allclose(column(other, name), column(runs[0], name), rtol=2e-4)
        ours, theirs = arrays(runs[0] / "adapter"), arrays(other / "adapter")
        rows_of = [name for name in ours if "new_rows" in name]
        assert rows_of and ours.keys() == theirs.keys()
        # Adam divides by the gradient's size: of entries that are all but zero its sign decides.
        assert all(mx.median(mx.abs(ours[name] - theirs[name])).item() < 1e-5 for name in rows_of)


@pytest.mark.parametrize("more", [[], ["adapter.modules_to_save=[embed_tokens]"], ["adapter.kind=full"]])
def test_a_resumed_run_equals_one_that_never_stopped(folders, tmp_path, more):
    if "adapter.kind=full" in more:
        more = [*more, "adapter.rank=null"]
    train(folders, "llama", tmp_path / "straight", *more)
    first = tmp_path / "straight" / "checkpoints" / "step-000001"
    train(folders, "llama", tmp_path / "again", *more, f"trainer.resume={first}")
    assert same(arrays(tmp_path / "straight" / "adapter"), arrays(tmp_path / "again" / "adapter"))
    assert metrics(tmp_path / "straight") == metrics(tmp_path / "again")


def test_a_run_that_began_from_an_adapter_with_tokens_resumes_to_the_same(folders, tmp_path):
    train(folders, "tied", tmp_path / "first")
    more = [f"adapter.init_from={tmp_path / 'first/adapter'}", f"data.valid={folders / 'chats.jsonl'}"]
    train(folders, "tied", tmp_path / "straight", *more, "trainer.eval_every=1", named=[])
    first = tmp_path / "straight" / "checkpoints" / "step-000001"
    more += ["trainer.eval_every=2", f"trainer.resume={first}"]
    train(folders, "tied", tmp_path / "again", *more, named=[])
    assert same(arrays(tmp_path / "straight" / "adapter"), arrays(tmp_path / "again" / "adapter"))


def test_the_best_adapter_has_the_tokenizer_though_it_is_found_again(folders, tmp_path):
    more = [f"data.valid={folders / 'chats.jsonl'}", "trainer.eval_every=1"]
    train(folders, "llama", tmp_path / "run", *more)
    best = tmp_path / "run" / "best"
    files = {path.name: path.read_bytes() for path in best.iterdir()}
    assert json.loads(files["best.json"])["step"] == 3 and "tokenizer.json" in files
    shutil.rmtree(best)
    train(folders, "llama", tmp_path / "run", *more, "trainer.resume=auto", "trainer.max_steps=4")
    shutil.rmtree(best)
    train(folders, "llama", tmp_path / "run", *more, "trainer.resume=auto", "trainer.max_steps=4")
    assert {"tokenizer.json", "tokenizer_config.json"} <= {path.name for path in best.iterdir()}
    assert not {"optimizer.safetensors", "state.json"} & {path.name for path in best.iterdir()}


def test_a_resumed_run_with_other_tokens_is_refused(folders, tmp_path):
    train(folders, "llama", tmp_path / "run", "trainer.max_steps=1")
    with pytest.raises(InputError, match="model.new_tokens: \\['<.call.>'\\] in the checkpoint, None now"):
        train(folders, "llama", tmp_path / "run", "trainer.resume=auto", named=NAMED[1:])


def test_later_commands_know_the_tokens_of_an_adapter(folders, tmp_path, capsys):
    train(folders, "llama", tmp_path / "run")
    adapter, model = f"adapter.init_from={tmp_path / 'run/adapter'}", f"model.path={folders / 'llama'}"
    rows = folders / "chats.jsonl"
    capsys.readouterr()

    def said(*words):
        assert cli.main(list(words)) == 0
        return capsys.readouterr().out

    evaluated = json.loads(said("eval", model, adapter, f"data.valid={rows}", "--json"))
    before = json.loads(said("eval", model, *NAMED, f"data.valid={rows}", "--json"))
    assert evaluated["tokens"] == before["tokens"] and evaluated["loss"] < before["loss"]
    assert said("generate", model, adapter, f"prompt={CALL}", "max_tokens=2")
    table = said("preview", model, adapter, f"data.train={rows}", "preview.rows=1", "preview.tokens=true")
    assert f"{VOCAB_SIZE} │ {CALL}" in table and f"{VOCAB_SIZE + 1} │ {RESULT}" in table
    assert cli.main(["export", model, adapter, "to=peft", f"out={tmp_path / 'out'}"]) == 2
    assert f"new tokens ({CALL}, {RESULT}), and the form has no place" in capsys.readouterr().err
    planned = json.loads(said("plan", model, adapter, f"data.train={rows}", "--json"))
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert planned["trained_parameters"] == summary["trainable_parameters"]
    train(folders, "llama", tmp_path / "more", adapter, named=[])
    assert column(tmp_path / "more", "loss")[0] < column(tmp_path / "run", "loss")[0]


@pytest.mark.parametrize("model, more", [
    ("llama", []),
    ("tied", ["adapter.targets=[embed_tokens,q_proj]"]),
    ("padded", ["adapter.kind=dora"]),
    ("quantised", []),
    ("llama", ["adapter.modules_to_save=[lm_head]"]),
    ("llama", ["adapter.kind=full", "adapter.rank=null"]),
])  # fmt: skip
def test_a_merged_model_has_the_tokens_for_mlx_lm(folders, tmp_path, model, more):
    """The command compares its logits with the trained model's, the new tokens' rows among them."""
    import mlx_lm

    train(folders, model, tmp_path / "run", *more)
    words = [f"model.path={folders / model}", f"adapter.init_from={tmp_path / 'run/adapter'}"]
    assert cli.main(["export", *words, "to=merged", f"out={tmp_path / 'out'}"]) == 0
    loaded, tokenizer = mlx_lm.load(str(tmp_path / "out"))
    assert tokenizer.encode(f"{CALL}{RESULT}", add_special_tokens=False) == [259, 260]
    size = 320 if model == "padded" else 261
    assert loaded(mx.array([[259, 260]])).shape[-1] == size
    assert json.loads((tmp_path / "out" / "config.json").read_text())["vocab_size"] == size


@pytest.mark.parametrize("more", [[], ["adapter.kind=full", "adapter.rank=null"]])
def test_the_reference_is_the_base_with_the_rows_it_was_given(folders, tmp_path, more):
    """So nothing is gained or lost before the first step; and tokens of other texts are another reference."""
    train(folders, "llama", tmp_path / "run", "trainer=dpo", *more, rows="pairs")
    assert column(tmp_path / "run", "rewards/margins")[0] == pytest.approx(0, abs=1e-5)
    assert abs(column(tmp_path / "run", "rewards/margins")[-1]) > 1e-4


def test_what_a_reference_scored_is_not_taken_for_tokens_that_begin_otherwise(folders, tmp_path, caplog):
    rows = [{"prompt_ids": [5, 6, n], "chosen_ids": [259, n], "rejected_ids": [260]} for n in range(7, 11)]
    write_rows(tmp_path / "rows.jsonl", rows)
    for number, named in enumerate((NAMED, NAMED, ['model.new_tokens=["other","<|result|>"]'])):
        caplog.clear()
        given = [f"model.path={folders / 'llama'}", f"data.train={tmp_path / 'rows.jsonl'}", "trainer=dpo"]
        mlxft.train([*given, f"run.dir={tmp_path / str(number)}", "data.format=tokens", *STEPS, *named])
        assert ("as kept in" in caplog.text) == (number == 1)


def test_a_reference_without_the_tokens_is_refused_though_its_tokenizer_is_the_same(folders, tmp_path):
    reference = f"loss.reference={folders / 'padded'}"
    with pytest.raises(InputError, match="token 259 is '<.call.>' to the model that is trained and None to"):
        train(folders, "llama", tmp_path / "run", "trainer=dpo", reference, rows="pairs")


def test_tokens_that_no_row_has_are_told(folders, tmp_path, caplog):
    named = [f'model.new_tokens=["{CALL}","{RESULT}","<|never|>"]']
    train(folders, "llama", tmp_path / "run", "trainer.max_steps=1", named=named)
    assert "no row to train on has <|never|>: nothing is learnt of them" in caplog.text


@pytest.mark.parametrize("given, message", [
    ("model.new_tokens=[]", "model.new_tokens: an empty list"),
    ('model.new_tokens=["a",""]', "model.new_tokens: '' is no token"),
    ('model.new_tokens=["  "]', "model.new_tokens: '  ' is no token"),
    ('model.new_tokens=["a","b","a"]', "model.new_tokens: 'a' is there 2 times"),
    ("model.new_tokens=word", "model.new_tokens: 'word' is not a list of tokens; write .* each in quotes"),
    ("model.new_tokens={a: b}", "model.new_tokens: .* is not a list"),
    ("model.new_tokens=[null]", "model.new_tokens: null is not a text"),
    ("model.new_tokens=[1]", "model.new_tokens: 1 is not a text; write .* in quotes"),
    (f'model.new_special_tokens=["{CALL}"]', f"new_special_tokens: '{CALL}' is in model.new_tokens too"),
    ("model.add_tokens=[a]", "here it is model.new_tokens"),
    ("model.additional_special_tokens=[a]", "here it is model.new_special_tokens"),
])  # fmt: skip
def test_tokens_that_are_none_end_every_command(folders, given, message, capsys):
    named = NAMED[:1] if "special_tokens=" in given and "additional" not in given else []
    words = [f"model.path={folders / 'llama'}", f"data.train={folders / 'chats.jsonl'}", *named, given]
    for command in ("train", "preview"):
        assert cli.main([command, *words]) == 2
        assert re.search(message.replace("|", "\\|"), capsys.readouterr().err)
