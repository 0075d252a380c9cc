from pathlib import Path

import mlx.core as mx
import pytest

from mlxft.errors import InputError
from mlxft.models.audit import check_dropped, check_fit, tensor_names, weight_files

HERE = Path("a/folder")


def arrays(*names, shape=(2, 2)):
    return {name: mx.zeros(shape) for name in names}


def test_names_are_read_from_the_header(tmp_path):
    mx.save_safetensors(str(tmp_path / "model.safetensors"), arrays("a", "b.c"))
    assert sorted(tensor_names(tmp_path / "model.safetensors")) == ["a", "b.c"]


@pytest.mark.parametrize("content, message", [
    (b"", "was cut short: 0 bytes"),
    (b"\x00" * 4, "was cut short: 4 bytes"),
    (b"\xff" * 64, "was cut short: 64 bytes"),
    ((2).to_bytes(8, "little") + b"no", "is damaged: its header cannot be read"),
    ((11).to_bytes(8, "little") + b'{"a": true}', "is damaged: its header cannot be read"),
])
def test_a_file_that_is_no_safetensors_is_named(tmp_path, content, message):
    file = tmp_path / "model.safetensors"
    file.write_bytes(content)
    with pytest.raises(InputError, match=f"{file}.*{message}"):
        tensor_names(file)


def test_a_tensor_in_two_files_is_refused(tmp_path):
    for name in ("model.safetensors", "model-00001-of-00002.safetensors"):
        mx.save_safetensors(str(tmp_path / name), arrays("x", name))
    with pytest.raises(InputError, match="the tensor x is in model-00001-of-.*and in model.safetensors"):
        weight_files(tmp_path)


def test_a_shard_that_the_index_lists_has_to_be_there(tmp_path):
    mx.save_safetensors(str(tmp_path / "model-1.safetensors"), arrays("x"))
    (tmp_path / "model.safetensors.index.json").write_text(
        '{"weight_map": {"x": "model-1.safetensors", "y": "model-2.safetensors"}}')
    with pytest.raises(InputError, match="lacks model-2.safetensors, listed in model.safetensors.index.json"):
        weight_files(tmp_path)


def test_misfits_are_listed_by_kind_with_counts_and_at_most_twelve_names():
    parameters = arrays("kept", "reshaped", "missing")
    weights = arrays("kept", *(f"extra{i:02}" for i in range(15))) | arrays("reshaped", shape=(2, 3))
    with pytest.raises(InputError) as error:
        check_fit(weights, parameters, HERE)
    first, missing, unused, wrong = str(error.value).splitlines()
    assert first == "the weights in a/folder do not fit its config.json:"
    assert missing == "  1 tensor missing from the checkpoint: missing"
    names = ", ".join(f"extra{i:02}" for i in range(12))
    assert unused == f"  15 tensors in the checkpoint, but not in the model: {names}, and 3 more"
    assert wrong == "  1 tensor of the wrong shape: reshaped (2, 3) instead of (2, 2)"


@pytest.mark.parametrize("name", [
    "model.layers.0.self_attn.rotary_emb.inv_freq", "vision_tower.encoder.layers.0.weight",
    "model.visual.blocks.0.weight", "multi_modal_projector.linear.weight", "mtp.layers.0.weight"])
def test_what_a_text_model_does_not_need_may_be_dropped(name):
    check_dropped(arrays("w", name), arrays("w"), {"model_type": "x"}, HERE)


def test_a_layer_that_predicts_further_tokens_may_be_dropped_and_no_other():
    before, config = arrays("model.layers.2.w"), {"num_hidden_layers": 2, "num_nextn_predict_layers": 1}
    check_dropped(before, {}, config, HERE)
    with pytest.raises(InputError):
        check_dropped(before, {}, {"num_hidden_layers": 2}, HERE)


def test_anything_else_that_is_dropped_is_an_error():
    with pytest.raises(InputError, match="code for x has no use for 1 tensor: score.weight"):
        check_dropped(before := arrays("w", "score.weight"), {"w": before["w"]}, {"model_type": "x"}, HERE)


def test_renamed_and_stacked_tensors_are_not_dropped():
    before = arrays("old.name", "experts.0.w", "experts.1.w")
    stacked = mx.stack([before["experts.0.w"], before["experts.1.w"]])
    after = {"new.name": before["old.name"], "experts.w": stacked}
    check_dropped(before, after, {}, HERE)


def test_tensors_that_may_have_gone_into_new_ones_are_a_warning(caplog):
    before = arrays("experts.0.w", "experts.1.w", "stray")
    after = {"experts.w": mx.stack([before["experts.0.w"], before["experts.1.w"]])}
    check_dropped(before, after, {"model_type": "moe"}, HERE)
    assert "3 tensors combined into others or dropped by mlx-lm's code for moe" in caplog.text


def test_a_tied_head_may_be_dropped_only_if_it_is_the_embedding():
    embedding = {"model.embed_tokens.weight": mx.arange(6.0).reshape(3, 2)}
    check_dropped(embedding | {"lm_head.weight": mx.arange(6.0).reshape(3, 2)}, embedding, {}, HERE)
    with pytest.raises(InputError, match='lm_head.weight would be dropped.*"tie_word_embeddings": false'):
        check_dropped(embedding | {"lm_head.weight": mx.ones((3, 2))}, embedding, {}, HERE)
