"""Train models of transformers in parallel, as they are: Llama, Qwen3, GPT-2, Mixtral, T5 and ViT, with random weights.

torchrun --nproc-per-node 4 examples/06_transformers.py   (or: python examples/06_transformers.py llama gpt2)

On 4 ranks each model is trained fully sharded over all of them, and over 2 × 2 with tensor parallelism; on 8 ranks over
2 × 2 × 2. The losses are those of a single process.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import torch
import transformers as hf

import shardwright as sw

SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
TEXT = {**SMALL, "vocab_size": 96, "num_key_value_heads": 2}
TOKENS = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
MODELS: dict[str, tuple[Any, Any]] = {
    "llama": (hf.LlamaForCausalLM, hf.LlamaConfig(**TEXT)),  # grouped query attention
    "qwen3": (hf.Qwen3ForCausalLM, hf.Qwen3Config(**TEXT, head_dim=8, tie_word_embeddings=True)),
    "gpt2": (  # tied weights, fused projections, Conv1D, dropout
        hf.GPT2LMHeadModel,
        hf.GPT2Config(vocab_size=96, n_embd=32, n_layer=2, n_head=4, n_positions=64, loss_type="ForCausalLM", **TOKENS),
    ),
    "mixtral": (hf.MixtralForCausalLM, hf.MixtralConfig(**TEXT, num_local_experts=4)),
    "t5": (
        hf.T5ForConditionalGeneration,
        hf.T5Config(vocab_size=96, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, decoder_start_token_id=0),
    ),
    "vit": (hf.ViTForImageClassification, hf.ViTConfig(**SMALL, image_size=16, patch_size=4, num_labels=10)),
}


def batch(name: str, step: int, samples: int = 6) -> dict[str, torch.Tensor]:
    """Return the global batch of a step, the same on every rank. Its samples do not divide by 4 ranks."""
    numbers = torch.Generator().manual_seed(step)
    if name == "vit":
        images = torch.randn(samples, 3, 16, 16, generator=numbers)
        return {"pixel_values": images, "labels": torch.randint(0, 10, (samples,), generator=numbers)}
    ids = torch.randint(1, 96, (samples, 12), generator=numbers)
    labels = ids.clone()
    labels[::2, :4] = -100  # the loss ignores these
    return {"input_ids": ids, "labels": labels}


def train(name: str, shape: tuple[int, ...], names: tuple[str, ...], steps: int = 3) -> list[float]:
    """Train one model on a mesh, and return its losses."""
    kind, config = MODELS[name]
    mesh = sw.init_device_mesh("cpu", shape, mesh_dim_names=names)
    with torch.device("meta"):
        model = kind(config)
    sw.parallelize(model, mesh)
    sw.manual_seed(0)
    model.to_empty(device="cpu").init_weights()
    model.train()

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for step in range(steps):
        loss = model(**sw.shard_batch(batch(name, step), mesh)).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


MESHES = {
    4: [((4,), ("dp",)), ((2, 2), ("dp", "tp"))],
    8: [((2, 2, 2), ("replicate", "dp", "tp"))],
}


def main(chosen: list[str]) -> list[float]:
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    first = int(os.environ.get("RANK", "0")) == 0
    everything = []
    for name in chosen or MODELS:
        for shape, names in MESHES.get(ranks, [((ranks,), ("dp",))]):
            losses = train(name, shape, names)
            if first:
                print(f"{name:<8} {' × '.join(map(str, shape)):<10} {' '.join(f'{loss:.6f}' for loss in losses)}")
        everything += losses
    if first:
        print("losses", " ".join(f"{loss:.6f}" for loss in everything))
    return everything


if __name__ == "__main__":
    main(sys.argv[1:])
