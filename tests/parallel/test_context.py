"""Context parallelism: attention on sharded sequences is that of torch, and models train as on one rank."""

from __future__ import annotations

import os
import weakref
from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

import shardwright as sw
from shardwright import comm
from shardwright.errors import ArgumentTypeError, MeshError, PlanError, UnsupportedError
from shardwright.parallel.context.attention import attend
from shardwright.parallel.context.blocks import Merged, add_block, block_gradients, grouped
from shardwright.parallel.context.flash import seen_by_flash
from shardwright.parallel.context.heads import HeadRanges
from shardwright.parallel.context.mask import Mask
from shardwright.testing import run_ranks, same_as_one_rank

FULL = os.environ.get("SHARDWRIGHT_BUDGET") == "full"
MODES: tuple[Any, ...] = ("heads", "gather")


def reference(query: Any, key: Any, value: Any, mask: Mask, segments: Any, padding: Any) -> Any:
    """Compute attention with torch and an explicit mask; a query without keys gives zeros."""
    length = query.shape[2]
    rows, columns = torch.arange(length)[:, None], torch.arange(length)
    visible = torch.ones(1, 1, length, length, dtype=torch.bool)
    if mask.causal:
        visible = visible & (columns <= rows)
    if mask.window is not None:
        visible = visible & (columns > rows - mask.window)
    if padding is not None:
        visible = visible & padding[:, None, None, :]
    if segments is not None:
        visible = visible & (segments[:, None, :, None] == segments[:, None, None, :])
    result = scaled_dot_product_attention(query, key, value, visible, enable_gqa=True)
    return torch.where(visible.any(-1, keepdim=True), result, 0.0)


CASES: list[tuple[int, int, int, dict[str, Any]]] = [  # heads, key heads, positions, mask
    (4, 2, 7, {"causal": True}),
    (3, 3, 7, {}),
    (6, 2, 7, {"causal": True, "window": 3}),
    (3, 1, 7, {"causal": True, "padding": True, "segments": True}),
    (4, 4, 2, {"causal": True, "padding": True}),  # fewer positions than ranks
]


def attention_on_ranks(tp: int) -> list[str]:
    """Return what differs from torch: results and gradients, on a mesh of cp and tp."""
    found = []
    mesh = sw.init_device_mesh("cpu", (comm.world().size // tp, tp), mesh_dim_names=("cp", "tp"))
    for number, (heads, key_heads, length, options) in enumerate(CASES):
        generator = torch.Generator().manual_seed(number)
        shapes = [(2, heads, length, 5), (2, key_heads, length, 5), (2, key_heads, length, 3)]
        plain = [torch.randn(shape, generator=generator, dtype=torch.float64, requires_grad=True) for shape in shapes]
        padding = torch.rand(2, length, generator=generator) < 0.7 if options.get("padding") else None
        segments = torch.arange(length).div(3, rounding_mode="floor").expand(2, -1) if "segments" in options else None
        mask = Mask(options.get("causal", False), options.get("window"))
        expected = reference(*plain, mask, segments, padding)
        weights = torch.randn(expected.shape, generator=generator, dtype=torch.float64)
        gradients = torch.autograd.grad((expected * weights).sum(), plain)

        def shard(tensor: Any, dim: int, mesh: Any = mesh) -> Any:
            placements = [sw.Shard(dim), sw.Shard(1) if tp > 1 and tensor.ndim == 4 else sw.Replicate()]
            return sw.distribute_tensor(tensor.detach(), mesh, placements)

        described = Mask(
            mask.causal,
            mask.window,
            None if padding is None else shard(padding, 1),
            None if segments is None else shard(segments.contiguous(), 1),
        )
        for mode in MODES:
            inputs = [shard(each, 2).requires_grad_() for each in plain]
            try:
                out = attend(mode, *inputs, described)
            except UnsupportedError:
                assert mode == "heads"
                assert heads // tp < mesh.size(0)
                continue
            (out * shard(weights, 2)).sum().backward()
            results = [out, *(each.grad for each in inputs)]
            for name, found_value, wanted in zip("oqkv", results, [expected, *gradients], strict=True):
                if not torch.allclose(found_value.full_tensor(), wanted, atol=1e-12):
                    found.append(f"{mode} {CASES[number]}: {name}")
    return found


@pytest.mark.timeout(200)
def test_attention_on_sharded_sequences_is_that_of_torch() -> None:
    for found in run_ranks(3, attention_on_ranks, 1, timeout=150.0):
        assert found == []


@pytest.mark.timeout(200)
def test_attention_over_sequences_and_heads_is_that_of_torch() -> None:
    for found in run_ranks(4, attention_on_ranks, 2, timeout=150.0):
        assert found == []


def test_heads_are_split_evenly_and_several_ranks_may_need_one_key_head() -> None:
    assert HeadRanges.split(8, 4, 3).keys == (range(2), range(2, 3), range(3, 4))
    assert HeadRanges.split(8, 4, 3).queries == (range(4), range(4, 6), range(6, 8))
    assert HeadRanges.split(4, 2, 4).keys == (range(1), range(1), range(1, 2), range(1, 2))


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(width)
        self.queries, self.keys, self.values = (nn.Linear(width, width) for _ in range(3))
        self.out = nn.Linear(width, width)

    def forward(self, x: Any) -> Any:
        normed = self.norm(x)
        parts = [
            layer(normed).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for layer in (self.queries, self.keys, self.values)
        ]
        attended = scaled_dot_product_attention(*parts, is_causal=True)
        return x + self.out(attended.transpose(1, 2).flatten(2))


class Model(nn.Module):
    """A language model that calls `F.scaled_dot_product_attention` itself."""

    def __init__(self, width: int = 12, heads: int = 3, layers: int = 2) -> None:
        super().__init__()
        self.embedding, self.positions = nn.Embedding(11, width), nn.Embedding(16, width)
        self.blocks = nn.ModuleList(Attention(width, heads) for _ in range(layers))
        self.head = nn.Linear(width, 11)

    def forward(self, tokens: Any) -> Any:
        x = self.embedding(tokens) + self.positions(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        return cross_entropy(self.head(x[:, :-1]).transpose(1, 2), tokens[:, 1:])


def tokens(step: int = 0, length: int = 9) -> torch.Tensor:
    return torch.randint(0, 11, (3, length), generator=torch.Generator().manual_seed(step))


@pytest.mark.timeout(300)
@pytest.mark.parametrize("mode", MODES)
def test_a_model_with_torch_attention_trains_as_on_one_rank(mode: Any) -> None:
    def parallelize(model: Any, mesh: Any) -> None:
        plan = {"blocks.*.[qkv]*": sw.ColwiseParallel(multiple=4), "blocks.*.out": sw.RowwiseParallel(multiple=4)}
        sw.parallelize(
            model,
            mesh,
            {**plan, "**": sw.Replicated()} if "tp" in mesh.mesh_dim_names else {},
            context=sw.ContextParallel(mode),
            checkpoint=True,
        )

    meshes: list[dict[str, int]] = [{"cp": 3}]
    if FULL:
        meshes += [{"replicate": 2, "cp": 2}, {"dp": 2, "cp": 2}, {"cp": 4}, {"cp": 3, "tp": 2}]
        if mode == "heads":
            meshes = [sizes for sizes in meshes if sizes not in ({"cp": 4}, {"cp": 3, "tp": 2})]
    same_as_one_rank(Model, tokens, parallelize, mesh=meshes, timeout=250.0)


@pytest.mark.timeout(300)
def test_a_transformers_model_trains_as_on_one_rank() -> None:
    hf = pytest.importorskip("transformers")
    small = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4}
    small |= {"num_key_value_heads": 2, "vocab_size": 96}
    kinds = {
        "mistral": lambda: hf.MistralForCausalLM(hf.MistralConfig(**small, sliding_window=4)),
        "llama": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**small)),
        "qwen3": lambda: hf.Qwen3ForCausalLM(hf.Qwen3Config(**small, head_dim=8, tie_word_embeddings=True)),
        "mixtral": lambda: hf.MixtralForCausalLM(hf.MixtralConfig(**small, num_local_experts=4)),
    }

    def batch(step: int) -> dict[str, Any]:
        ids = torch.randint(1, 96, (3, 13), generator=torch.Generator().manual_seed(step))
        padding = torch.ones_like(ids)
        padding[0, 9:] = 0
        padding[1, :3] = 0
        return {"input_ids": ids, "labels": ids.masked_fill(padding == 0, -100), "attention_mask": padding}

    for mode in MODES:
        for name in kinds if FULL else ["mistral"]:
            same_as_one_rank(
                kinds[name],
                batch,
                lambda model, mesh, mode=mode: sw.parallelize(model, mesh, context=sw.ContextParallel(mode)),
                mesh=[{"cp": 3}, {"dp": 2, "cp": 2}, {"cp": 2, "tp": 2}] if FULL else {"cp": 3},
                dtype=torch.float32,
                tolerance=2e-5,
                timeout=250.0,
            )


BLOCK = 3 * 4 * 3 * 4  # bytes of a head of a block: samples, positions, features, bytes of each


def counted(mode: Any) -> Any:
    """Return the transfers of attention in a step, those predicted, and how many blocks of others were held."""
    mesh = sw.init_device_mesh("cpu", (4,), mesh_dim_names=("cp",))
    model = sw.parallelize(Model(heads=4), mesh, {}, context=sw.ContextParallel(mode))
    batch = sw.shard_batch(tokens(length=16), mesh)
    start, buffers, held = comm.start_exchange, [], []

    def spy(sends: Any, receives: Any, group: Any) -> Any:
        buffers.extend(weakref.ref(buffer) for buffer in receives.values() if buffer.nbytes == 2 * 4 * BLOCK)
        held.append(sum(buffer() is not None for buffer in buffers))
        return start(sends, receives, group)

    comm.start_exchange = spy  # type: ignore[assignment]  # counts what is alive
    try:
        for _ in range(2):
            buffers.clear()
            held.clear()
            forward: list[comm.Transfer] = []
            backward: list[comm.Transfer] = []
            with comm.listen(forward.append):
                loss = model(batch)
            most = max(held, default=0)
            with comm.listen(backward.append):
                loss.backward()
    finally:
        comm.start_exchange = start
    prediction = sw.predict(
        Model(heads=4),
        {"cp": 4},
        {},
        tokens(length=16),
        rank=comm.rank(),
        device="cpu",
        context=sw.ContextParallel(mode),
    )
    kinds = ("all_to_all", "exchange")
    attention = [[each.received for each in part if each.kind in kinds] for part in (forward, backward)]
    same = [(*forward,) == prediction.forward, (*backward,) == prediction.backward]
    return attention, same, most, Counter(each.kind for each in (*forward, *backward))


@pytest.mark.timeout(300)
def test_collectives_are_those_predicted_and_documented() -> None:
    for attention, same, _, _ in run_ranks(4, counted, "heads", timeout=120.0):
        assert same == [True, True]
        # queries, keys and values to one of four heads: three quarters of the sequence; then the result back
        assert attention[0][:4] == [3 * 3 * BLOCK, 3 * BLOCK] * 2
        assert attention[1][-4:] == [3 * BLOCK, 3 * 3 * BLOCK] * 2
    for rank, (attention, same, most, _) in enumerate(run_ranks(4, counted, "gather", timeout=120.0)):
        assert same == [True, True]
        received = [size for size in attention[0] if size]
        assert received[: 2 * rank] == [2 * 4 * BLOCK] * (2 * rank)  # keys and values of the ranks before, in 2 layers
        assert most <= 2


def errors_of(*calls: Any) -> list[Any]:
    """Call functions that must raise, and return the type and the message of each error."""
    found = []
    for call in calls:
        with pytest.raises(Exception) as caught:
            call()
        found.append((caught.type, str(caught.value)))
    return found


def test_wrong_arguments_are_found_on_all_ranks_before_anything_changes() -> None:
    def work() -> list[Any]:
        wide = sw.init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
        flat = sw.init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
        unknown = sw.init_device_mesh("cpu", (2,), mesh_dim_names=("sp",))
        model = Model(heads=1)
        batch = sw.shard_batch(tokens(), wide)
        results = errors_of(
            lambda: sw.ContextParallel("ring"),  # type: ignore[arg-type]  # wrong on purpose
            lambda: sw.parallelize(model, flat, {}, context=sw.ContextParallel("heads")),
            lambda: sw.parallelize(model, wide, {}, context="heads"),  # type: ignore[arg-type]  # likewise
            lambda: sw.parallelize(model, unknown, {}),
            lambda: sw.parallelize(model, wide, {}, context=sw.ContextParallel("heads"))(batch),
        )
        assert torch.isfinite(sw.parallelize(Model(heads=1), wide, {})(batch)).item()
        return results

    for found in run_ranks(2, work, timeout=100.0):
        types = [ArgumentTypeError, PlanError, ArgumentTypeError, MeshError, UnsupportedError]
        assert [kind for kind, _ in found] == types
        assert "no dimension named 'cp'" in found[1][1]
        assert 'use ContextParallel("gather")' in found[4][1]


def test_masks_and_dropout_that_are_not_known_are_refused() -> None:
    def work() -> list[Any]:
        mesh = sw.init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))

        class Odd(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.layer = nn.Linear(4, 4)

            def forward(self, x: Any, **options: Any) -> Any:
                x = self.layer(x).unsqueeze(1)
                return scaled_dot_product_attention(x, x, x, **options)

        model = sw.parallelize(Odd(), mesh, {})
        x = sw.shard_batch(torch.ones(2, 6, 4), mesh)
        return errors_of(
            lambda: model(x, attn_mask=sw.ones(6, 6, mesh=mesh)),
            lambda: model(x, dropout_p=0.5),
            lambda: torch.autograd.grad(model(x).sum(), model.layer.weight, create_graph=True),
        )

    for results in run_ranks(2, work, timeout=100.0):
        assert [kind for kind, _ in results] == [UnsupportedError] * 3


def test_batches_are_sharded_along_the_sequence() -> None:
    def work() -> list[str]:
        mesh = sw.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
        ids = tokens()
        own = ids[: 2 if comm.rank() < 2 else 1]  # of each rank along dp
        per_rank = sw.shard_batch(own, mesh, per_rank=True)
        assert torch.equal(sw.shard_batch(ids, mesh).full_tensor(), ids)
        assert torch.equal(per_rank.full_tensor()[:2], ids[:2])
        kept = sw.shard_batch({"ids": ids, "labels": torch.ones(3)}, mesh, sequence_dim=None)
        values = [sw.shard_batch(ids, mesh), per_rank, kept["ids"], sw.shard_batch(torch.ones(3), mesh)]
        return [str(value.sharding).partition("] ")[2] for value in values]

    for shown in run_ranks(4, work):
        assert shown == ["(dp: S(0), cp: S(1))", "(dp: S(0), cp: S(1))", "(dp: S(0), cp: R)", "(dp: S(0), cp: R)"]


def test_joining_a_sequence_with_nothing_keeps_it_sharded() -> None:
    """As an empty cache of keys is joined with the first ones."""

    def work() -> str:
        mesh = sw.init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
        keys = sw.distribute_tensor(torch.arange(14.0).view(1, 2, 7), mesh, [sw.Shard(2)])
        joined = torch.cat([sw.zeros(0, mesh=mesh), keys], dim=-1)
        assert torch.equal(joined.full_tensor(), keys.full_tensor())
        return str(joined.sharding)

    assert set(run_ranks(2, work)) == {"[1, 2, 7] (cp: S(2))"}


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_flash_kernels_merge_blocks_as_one_attention() -> None:
    make: dict[str, Any] = {"device": "cuda", "generator": torch.Generator("cuda").manual_seed(0)}
    query, key, value, upper = (torch.randn(2, heads, 64, 32, **make).bfloat16() for heads in (4, 2, 2, 4))
    plain = [each.float().requires_grad_() for each in (query, key, value)]
    expected = scaled_dot_product_attention(*plain, is_causal=True, enable_gqa=True)
    wanted = torch.autograd.grad(expected[:, :, 24:], plain, upper[:, :, 24:].float())
    mask, own, blocks = Mask(causal=True), range(24, 64), [range(24), range(24, 64)]
    rows, gradient = grouped(query[:, :, 24:], 2), grouped(upper[:, :, 24:], 2)
    merged = Merged.empty(rows, 32)
    pieces = [(key[:, :, each.start : each.stop], value[:, :, each.start : each.stop]) for each in blocks]
    for piece, each in zip(pieces, blocks, strict=True):
        assert seen_by_flash(rows, *piece, mask, own, each) is not None
        add_block(merged, rows, *piece, mask, own, each, 32**-0.5)
    out = merged.out.bfloat16()
    delta = (out.float() * gradient).sum(-1)
    query_gradient = torch.zeros(rows.shape, device="cuda")
    found = [
        block_gradients(gradient, out, delta, merged.lse, rows, *piece, mask, own, each, 32**-0.5, query_gradient)
        for piece, each in zip(pieces, blocks, strict=True)
    ]
    results = [merged.out, query_gradient, *(torch.cat([pair[part] for pair in found], 2) for part in (0, 1))]
    references = [expected[:, :, 24:], wanted[0][:, :, 24:], *wanted[1:]]
    for result, reference_value in zip(results, references, strict=True):
        assert torch.allclose(result.view(reference_value.shape), reference_value, atol=0.02)
