"""What PEFT and transformers make of exports, on PyTorch: run where they are installed (pytest -m slow)."""

import pytest

from mlxft.models.adapters import load_adapter
from mlxft.models.load import load_model
from tests.export.made import TOKENS, adapter, difference, export, logits
from tests.tiny_models import make_model

pytestmark = pytest.mark.slow
torch = pytest.importorskip("torch")
peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")

CASES = [
    ("llama", {}),
    ("llama", {"rank": 9, "rslora": True}),
    ("llama", {"rank": 4, "ranks": {"q_proj": 8, "down_proj": 2}}),
    ("llama", {"kind": "dora", "alpha": 3.0}),
    ("llama", {"targets": ["q_proj", "embed_tokens", "lm_head"]}),
    ("llama", {"targets": ["q_proj"], "modules_to_save": ["embed_tokens", "*norm"]}),
    ("qwen2", {}),
    ("qwen3", {"layers": "last 2"}),
    ("qwen3", {"targets": ["q_proj", "embed_tokens"]}),
    ("qwen3", {"targets": ["q_proj"], "modules_to_save": ["embed_tokens"]}),
    ("gemma3_text", {"kind": "dora"}),
]


def torch_model(folder):
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def torch_logits(model):
    with torch.no_grad():
        return model(torch.tensor([TOKENS])).logits[0].numpy()


def trained_logits(base, folder):
    model = load_model(base)
    load_adapter(model, folder)
    return logits(model)


@pytest.fixture(scope="module")
def bases(tmp_path_factory):
    root = tmp_path_factory.mktemp("bases")
    families = {family for family, _ in CASES}
    return {family: make_model(root / family, family) for family in families}


@pytest.mark.parametrize("family, settings", CASES, ids=str)
def test_peft_gives_an_exported_adapter_the_trained_logits(bases, tmp_path, family, settings):
    base = bases[family]
    trained = adapter(base, tmp_path / "adapter", **settings)
    export(f"model.path={base}", f"adapter.init_from={trained}", to="peft", out=tmp_path / "peft")
    theirs = peft.PeftModel.from_pretrained(torch_model(base), tmp_path / "peft")
    assert difference(torch_logits(theirs), trained_logits(base, trained)) < 1e-5


@pytest.mark.parametrize("family, settings", CASES, ids=str)
def test_transformers_gives_a_merged_model_the_trained_logits(bases, tmp_path, family, settings):
    base = bases[family]
    trained = adapter(base, tmp_path / "adapter", **settings)
    export(f"model.path={base}", f"adapter.init_from={trained}", to="merged", out=tmp_path / "merged")
    assert difference(torch_logits(torch_model(tmp_path / "merged")), trained_logits(base, trained)) < 1e-5

