"""What `convert` exports, transformers loads, and computes the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

import shardwright as sw
from shardwright import checkpoint
from shardwright.interop import convert
from shardwright.interop.mapping import LLAMA_MEGATRON, MIXTRAL
from shardwright.testing import run_ranks

SMALL: dict[str, Any] = {
    "vocab_size": 11,
    "hidden_size": 16,
    "intermediate_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


def test_tied_weights_are_written_once_and_transformers_computes_the_same_logits(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SMALL, tie_word_embeddings=True))
    model.save_pretrained(tmp_path / "like")
    checkpoint.save(model.state_dict(), tmp_path / "ours")
    convert(tmp_path / "ours", tmp_path / "hf", to="hf", like=tmp_path / "like")
    assert "lm_head.weight" not in load_file(tmp_path / "hf/model.safetensors")
    again = LlamaForCausalLM.from_pretrained(tmp_path / "hf")
    tokens = torch.arange(6)[None]
    assert torch.equal(again(tokens).logits, model(tokens).logits)
    convert(tmp_path / "ours", tmp_path / "w.pt", to="torch")
    loaded = torch.load(tmp_path / "w.pt", weights_only=True)
    assert loaded["lm_head.weight"].data_ptr() == loaded["model.embed_tokens.weight"].data_ptr()


def test_a_model_with_fused_tensors_is_exported_by_the_inverse_of_its_mapping(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = MixtralForCausalLM(MixtralConfig(**SMALL, num_local_experts=3))
    model.save_pretrained(tmp_path / "like")
    checkpoint.save(model.state_dict(), tmp_path / "ours")
    mapping = sw.Mapping(MIXTRAL).inverse()
    convert(tmp_path / "ours", tmp_path / "hf", to="hf", mapping=mapping, like=tmp_path / "like")
    assert_same(load_file(tmp_path / "hf/model.safetensors"), load_file(tmp_path / "like/model.safetensors"))
    assert (tmp_path / "hf/config.json").read_bytes() == (tmp_path / "like/config.json").read_bytes()
    again = MixtralForCausalLM.from_pretrained(tmp_path / "hf")
    tokens = torch.arange(6)[None]
    assert torch.equal(again(tokens).logits, model(tokens).logits)


def test_a_padded_vocabulary_is_not_exported(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SMALL))
    model.save_pretrained(tmp_path / "like")
    mapping = sw.Mapping(LLAMA_MEGATRON, d=4, n=2, pad=5)
    checkpoint.save(mapping.apply(model.state_dict()), tmp_path / "megatron")
    convert(tmp_path / "megatron", tmp_path / "hf", to="hf", mapping=mapping.inverse(), like=tmp_path / "like")
    assert_same(load_file(tmp_path / "hf/model.safetensors"), load_file(tmp_path / "like/model.safetensors"))


def test_a_folder_of_hugging_face_is_loaded_into_a_model_of_transformers_by_a_mapping(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = MixtralForCausalLM(MixtralConfig(**SMALL, num_local_experts=3))
    model.save_pretrained(tmp_path / "hf", max_shard_size="20KB")
    assert (tmp_path / "hf/model.safetensors.index.json").exists()
    other = MixtralForCausalLM(MixtralConfig(**SMALL, num_local_experts=3))
    checkpoint.load(other, tmp_path / "hf", mapping=sw.Mapping(MIXTRAL))
    assert_same(other.state_dict(), model.state_dict())


def _load_sharded(path: str) -> None:
    mesh = sw.init_device_mesh("cpu", (2,))
    torch.manual_seed(0)
    model = MixtralForCausalLM(MixtralConfig(**SMALL, num_local_experts=3))
    shards = {
        name: sw.zeros(*tensor.shape, mesh=mesh, placements=[sw.Shard(tensor.ndim - 1)])
        for name, tensor in model.state_dict().items()
    }
    sw.checkpoint.load(shards, path, mapping=sw.Mapping(MIXTRAL))
    for name, tensor in model.state_dict().items():
        assert torch.equal(shards[name].full_tensor(), tensor), name


def test_ranks_load_their_shards_of_fused_experts_from_a_folder_of_hugging_face(tmp_path: Path) -> None:
    torch.manual_seed(0)
    MixtralForCausalLM(MixtralConfig(**SMALL, num_local_experts=3)).save_pretrained(tmp_path)
    run_ranks(2, _load_sharded, str(tmp_path))


def test_round_trip_through_every_format_keeps_every_bit(tmp_path: Path) -> None:
    """Ours, distributed checkpoint, torch file, Hugging Face folder, and ours again."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SMALL)).bfloat16()
    state = model.state_dict()
    checkpoint.save(state, tmp_path / "ours")
    steps = [("ours", "dcp", "dcp"), ("dcp", "w.pt", "torch"), ("w.pt", "hf", "hf"), ("hf", "again", "shardwright")]
    model.config.save_pretrained(tmp_path / "like")
    for source, result, to in steps:
        like = tmp_path / "like" if to == "hf" else None
        convert(tmp_path / source, tmp_path / result, to=to, like=like)  # type: ignore[arg-type]  # a format
    assert_same(checkpoint.read(tmp_path / "again"), state)
    loaded = LlamaForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.bfloat16)
    tokens = torch.arange(6)[None]
    assert torch.equal(loaded(tokens).logits, model(tokens).logits)
