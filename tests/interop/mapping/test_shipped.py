"""The shipped mappings equal what `transformers` does, or what its conversion scripts define."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

import shardwright as sw
from shardwright.interop.mapping import LLAMA, LLAMA_MEGATRON, MIXTRAL, QWEN3_MOE, SHIPPED

HEADS, GROUPS, HEAD = 4, 2, 8
SIZES = {
    "vocab_size": 11,
    "hidden_size": 16,
    "intermediate_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": HEADS,
    "num_key_value_heads": GROUPS,
    "head_dim": HEAD,
}


def llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SIZES))


def mixtral() -> MixtralForCausalLM:
    torch.manual_seed(0)
    return MixtralForCausalLM(MixtralConfig(**SIZES, num_local_experts=3))


def qwen3_moe() -> Qwen3MoeForCausalLM:
    """A model whose second layer is not one of experts."""
    torch.manual_seed(0)
    config = Qwen3MoeConfig(**SIZES, moe_intermediate_size=6, num_experts=3, num_experts_per_tok=2, mlp_only_layers=[1])
    return Qwen3MoeForCausalLM(config)


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


def saved(model: PreTrainedModel, folder: Path) -> dict[str, torch.Tensor]:
    model.save_pretrained(folder)
    return load_file(folder / "model.safetensors")


@pytest.mark.parametrize(("make", "text"), [(mixtral, MIXTRAL), (qwen3_moe, QWEN3_MOE)])
def test_files_of_experts_become_the_parameters_of_transformers_and_back(
    make: type[PreTrainedModel], text: str, tmp_path: Path
) -> None:
    model = make()
    files = saved(model, tmp_path / "a")
    mapping = sw.Mapping(text)
    assert_same(mapping.apply(files), model.state_dict())
    assert_same(mapping.inverse().apply(model.state_dict()), files)


def test_transformers_loads_a_mixtral_that_the_inverse_made_and_computes_the_same(tmp_path: Path) -> None:
    model = mixtral()
    saved(model, tmp_path)
    made = sw.Mapping(MIXTRAL).inverse().apply(model.state_dict())
    save_file(made, tmp_path / "model.safetensors", metadata={"format": "pt"})
    again = MixtralForCausalLM.from_pretrained(tmp_path)
    tokens = torch.arange(6)[None]
    assert torch.equal(again(tokens).logits, model(tokens).logits)


def test_llama_equals_the_permutation_of_the_conversion_script_of_transformers(tmp_path: Path) -> None:
    """`convert_llama_weights_to_hf.py` permutes queries and keys like this, from Meta's layout to Hugging Face's."""

    def permute(weight: torch.Tensor, heads: int) -> torch.Tensor:
        rows, columns = weight.shape
        return weight.view(heads, rows // heads // 2, 2, columns).transpose(1, 2).reshape(rows, columns)

    files = saved(llama(), tmp_path)
    mapping = sw.Mapping(LLAMA, r=HEAD // 2)
    original = mapping.apply(files)
    assert len(original) == len(files)
    for layer in range(2):
        for ours, theirs, heads in (("wq", "q_proj", HEADS), ("wk", "k_proj", GROUPS)):
            permuted = permute(original[f"layers.{layer}.attention.{ours}.weight"], heads)
            assert torch.equal(permuted, files[f"model.layers.{layer}.self_attn.{theirs}.weight"])
        for ours, theirs in (("w1", "gate"), ("w2", "down"), ("w3", "up")):
            weight = original[f"layers.{layer}.feed_forward.{ours}.weight"]
            assert torch.equal(weight, files[f"model.layers.{layer}.mlp.{theirs}_proj.weight"])
    assert torch.equal(original["tok_embeddings.weight"], files["model.embed_tokens.weight"])
    assert torch.equal(original["output.weight"], files["lm_head.weight"])
    assert_same(mapping.inverse().apply(original), files)


def test_llama_in_megatron_has_groups_of_queries_a_key_and_a_value_and_a_padded_vocabulary(tmp_path: Path) -> None:
    files = saved(llama(), tmp_path)
    mapping = sw.Mapping(LLAMA_MEGATRON, d=HEAD, n=HEADS // GROUPS, pad=5)
    mapped = mapping.apply(files)
    for layer in range(2):
        rows = []
        q, k, v = (files[f"model.layers.{layer}.self_attn.{name}_proj.weight"].split(HEAD) for name in "qkv")
        for group in range(GROUPS):
            per = HEADS // GROUPS
            rows += [*q[group * per : (group + 1) * per], k[group], v[group]]
        assert torch.equal(mapped[f"decoder.layers.{layer}.self_attention.linear_qkv.weight"], torch.cat(rows))
        gate, up = (files[f"model.layers.{layer}.mlp.{name}_proj.weight"] for name in ("gate", "up"))
        assert torch.equal(mapped[f"decoder.layers.{layer}.mlp.linear_fc1.weight"], torch.cat([gate, up]))
    padded = mapped["embedding.word_embeddings.weight"]
    assert padded.shape == (16, 16)
    assert not padded[11:].any()
    assert_same(mapping.inverse().apply(mapped), files)


def test_every_shipped_mapping_has_at_most_twenty_lines() -> None:
    assert SHIPPED.keys() == {"llama", "llama-megatron", "mixtral", "qwen3-moe"}
    for text in SHIPPED.values():
        assert len(text.splitlines()) <= 20
        assert sw.Mapping(text).rules
