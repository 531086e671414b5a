"""Models of transformers, unchanged, train in parallel as with plain torch on one rank, and generate the same."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import Any

import pytest
import torch

import shardwright as sw
from shardwright.testing import run_ranks, same_as_one_rank

pytest.importorskip("transformers")

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "06_transformers.py"
FULL = os.environ.get("SHARDWRIGHT_BUDGET") == "full"
MODELS = ("llama", "gpt2", "qwen3", "mixtral", "t5", "vit") if FULL else ("llama", "gpt2")
MESHES: list[dict[str, int]] = [{"dp": 2, "tp": 2}]
if FULL:
    MESHES += [{"dp": 4}, {"replicate": 2, "dp": 2, "tp": 2}]
# transformers computes norms, rotations and losses in float32, whatever the dtype of the model.
TOLERANCE = 2e-5


def example() -> Any:
    """Import the example by its path: the file name begins with digits."""
    spec = importlib.util.spec_from_file_location("example_transformers", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def build(name: str, **changes: Any) -> Any:
    kind, config = example().MODELS[name]
    for key, value in changes.items():
        setattr(config, key, value)
    model = kind(config)
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0  # the random numbers of DTensors are not torch's
    return model.train()


def compare(name: str, **options: Any) -> None:
    changes = options.pop("changes", {})
    same_as_one_rank(
        options.pop("model", lambda: build(name, **changes)),
        lambda step: example().batch(name, step),
        options.pop("parallelize", sw.parallelize),
        mesh=options.pop("mesh", MESHES),
        dtype=torch.float32,
        tolerance=TOLERANCE,
        timeout=300.0,
        **options,
    )


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", MODELS)
def test_a_model_trains_as_with_plain_torch(name: str) -> None:
    compare(name, max_norm=1.0)


@pytest.mark.timeout(300)
def test_recomputed_activations_of_the_model_and_of_parallelize_give_the_same_gradients() -> None:
    def own(model: Any, mesh: Any) -> None:
        model.gradient_checkpointing_enable()
        sw.parallelize(model, mesh)

    def ours(model: Any, mesh: Any) -> None:
        sw.parallelize(model, mesh, checkpoint=True)

    for parallelize in (own, ours) if FULL else (own,):
        compare("llama", parallelize=parallelize, mesh=MESHES[:1])


class Adapter(torch.nn.Module):
    """A frozen layer with a low-rank update that is trained, as in LoRA."""

    def __init__(self, base: torch.nn.Linear) -> None:
        super().__init__()
        self.base_layer = base.requires_grad_(False)
        self.lora_A = torch.nn.Linear(base.in_features, 2, bias=False)
        self.lora_B = torch.nn.Linear(2, base.out_features, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base_layer(x) + self.lora_B(self.lora_A(x))


@pytest.mark.timeout(300)
def test_adapters_on_a_frozen_model_train_as_with_plain_torch() -> None:
    def adapted() -> Any:
        model = build("llama").requires_grad_(False)
        for layer in model.model.layers:
            for name in ("q_proj", "v_proj", "o_proj"):
                setattr(layer.self_attn, name, Adapter(getattr(layer.self_attn, name)))
        return model

    compare("llama", model=adapted, mesh=MESHES[:1])


@pytest.mark.skipif(not FULL, reason="SHARDWRIGHT_BUDGET=full: 8 ranks")
@pytest.mark.timeout(600)
def test_28_heads_over_8_ranks() -> None:
    heads = {"hidden_size": 56, "num_attention_heads": 28, "num_key_value_heads": 4, "head_dim": 2}
    compare("llama", changes=heads, mesh={"tp": 8})


@pytest.mark.timeout(200)
def test_generate_gives_the_tokens_of_one_rank() -> None:
    def work(sizes: dict[str, int]) -> Any:
        torch.manual_seed(0)
        model = build("llama").eval()
        prompts = torch.arange(1, 17).view(4, 4)
        options = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
        expected = model.generate(prompts, **options)
        mesh = sw.init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
        sw.parallelize(model, mesh)
        found = model.generate(sw.shard_batch(prompts, mesh), **options)
        return expected.tolist(), found.full_tensor().tolist()

    for sizes in ({"tp": 2}, {"dp": 2}):
        for expected, found in run_ranks(2, work, sizes, timeout=150.0):
            assert found == expected
