"""Train a tiny Llama with FSDP2: a script written for PyTorch, not for shardwright.

`torchrun --nproc-per-node 2 fsdp2_script.py` runs it. The tests run it as it is, and with its import of FSDP2 changed
to `shardwright`; nothing else differs.
"""

from itertools import pairwise

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from transformers import LlamaConfig, LlamaForCausalLM

CONFIG = LlamaConfig(
    vocab_size=99,
    hidden_size=32,
    intermediate_size=56,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
    attention_dropout=0.0,
)


def build(mesh, policy, reshard, checkpointing, tied):
    """Make the model on the meta device, shard it, and initialize it."""
    CONFIG.tie_word_embeddings = tied
    with torch.device("meta"):
        model = LlamaForCausalLM(CONFIG)
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    kwargs = {"mesh": mesh, "mp_policy": policy}
    for layer in model.model.layers:
        fully_shard(layer, reshard_after_forward=reshard, **kwargs)
    fully_shard(model, **kwargs)
    assert isinstance(model, FSDPModule)
    layers = list(model.model.layers)
    for layer, following in pairwise(layers):
        layer.set_modules_to_forward_prefetch([following])
    model.to_empty(device="cpu")
    for module in model.modules():
        if hasattr(module, "original_inv_freq"):  # the rotary embedding computes its buffer when it is made
            rotary = type(module)(CONFIG)
            module.inv_freq, module.original_inv_freq = rotary.inv_freq, rotary.original_inv_freq
    for name, parameter in model.named_parameters():
        seed = sum(map(ord, name)) + dist.get_rank()
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            local = parameter.to_local()
            local.copy_(0.05 * torch.randn(local.shape, generator=generator) + ("norm" in name))
    return model


def train(mesh, dtype=None, reshard=True, checkpointing=False, tied=False, steps=2, micro_batches=2):
    """Return the loss of every micro-batch and the gradient norm of every step, on this rank."""
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32) if dtype else MixedPrecisionPolicy()
    model = build(mesh, policy, reshard, checkpointing, tied)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=True)
    results = []
    for step in range(steps):
        for micro_batch in range(micro_batches):
            generator = torch.Generator().manual_seed(100 * step + 10 * micro_batch + dist.get_rank())
            tokens = torch.randint(0, CONFIG.vocab_size, (2, 9), generator=generator)
            last = micro_batch == micro_batches - 1
            model.set_requires_gradient_sync(last)
            model.set_is_last_backward(last)
            loss = model(input_ids=tokens, labels=tokens).loss / micro_batches
            loss.backward()
            results.append(loss.item())
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
        results.append(norm.full_tensor().item() if hasattr(norm, "full_tensor") else norm.item())
        optimizer.step()
        optimizer.zero_grad()
    model.eval()
    with torch.no_grad():
        tokens = torch.arange(8).unsqueeze(0)
        results.append(model(input_ids=tokens, labels=tokens).loss.item())
        generated = model.generate(tokens, max_new_tokens=4, do_sample=False, pad_token_id=0)
    return results, generated.tolist()


def main():
    """Train in the ways that scripts choose from."""
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
    return {
        "plain": train(mesh),
        "kept after forward": train(mesh, reshard=False, steps=1),
        "checkpointing": train(mesh, checkpointing=True, steps=1),
        "tied": train(mesh, tied=True, steps=1),
        "bfloat16": train(mesh, dtype=torch.bfloat16, steps=2),
    }


if __name__ == "__main__":
    print(main())  # noqa: T201  # it is a script
