"""A mixture that we made of a dense model, opened by transformers, has the dense model's logits."""

import pytest
from tiny_models import CONFIGS, tiny_config, write_directory

from jaxrl_llm.checkpoint.upcycling import Upcycling, upcycle

torch = pytest.importorskip("torch", reason="pip install -e '.[parity]'")
transformers = pytest.importorskip("transformers", reason="pip install -e '.[parity]'")
pytestmark = pytest.mark.torch

# transformers' Mixtral takes the head size from config.json; SmolLM2's is hidden / heads.
DENSE = {
    "llama": CONFIGS["llama"],
    "smollm2": tiny_config(
        tie_word_embeddings=True, hidden_size=36, num_heads=9, num_kv_heads=3, head_dim=4,
        rope_theta=100000.0, rms_norm_eps=1e-5,
    ),
    "mistral": CONFIGS["mistral"],
    "qwen3": CONFIGS["qwen3"],
}  # fmt: skip


@pytest.mark.parametrize("name", DENSE)
def test_transformers_computes_the_dense_model(name, tmp_path):
    dense = write_directory(tmp_path / "dense", DENSE[name])
    mixture = upcycle(dense, tmp_path / "moe", Upcycling(experts=4, router_std=0.5))
    tokens = torch.randint(1, 96, (3, 11), generator=torch.Generator().manual_seed(0))
    logits = []
    for folder in (dense, mixture):
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
        logits.append(model(tokens).logits.detach())
    assert type(model).__name__ in ("MixtralForCausalLM", "Qwen3MoeForCausalLM")
    assert logits[0].std() > 0.1
    torch.testing.assert_close(logits[1], logits[0], atol=1e-5, rtol=1e-5)
