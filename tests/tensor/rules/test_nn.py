"""Losses, norms, bags, masks and Python functions of torch match torch in values and gradients."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812  # torch's own short name
from torch import Tensor, nn

import shardwright as sw
from shardwright import comm
from shardwright.errors import MixedTensorsError
from shardwright.testing import on_ranks, run_ranks

R, S, P = sw.Replicate(), sw.Shard, sw.Partial


def r(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, dtype=torch.float64, generator=generator).requires_grad_()


def i(*shape: int, high: int) -> Tensor:
    return torch.randint(0, high, shape, generator=torch.Generator().manual_seed(sum(shape)))


def batch_norm(x: Tensor, w: Tensor, b: Tensor) -> tuple[Tensor, ...]:
    means, spreads = torch.zeros_like(w).detach(), torch.ones_like(w).detach()
    return (*torch.native_batch_norm(x, w, b, means, spreads, True, 0.1, 1e-5), means, spreads)


LOGS = r(6, 5, 4).detach().log_softmax(-1).requires_grad_()
LABELS, COUNTS = i(5, 3, high=3) + 1, [3, 2, 1, 3, 2]
CASES: list[Any] = [
    ("multi margin", lambda x, t, w: F.multi_margin_loss(x, t, weight=w), [r(5, 4), i(5, high=4), r(4).detach().abs()]),
    ("multilabel margin", lambda x, t: F.multilabel_margin_loss(x, t), [r(5, 4), i(5, 4, high=4)]),
    ("triplet", lambda a, p, n: F.triplet_margin_loss(a, p, n, swap=True), [r(5, 4), r(5, 4, seed=1), r(5, 4, seed=2)]),
    (
        "triplet with its own distance",
        lambda a, p, n: F.triplet_margin_with_distance_loss(
            a, p, n, distance_function=lambda x, y: (x - y).abs().sum(-1)
        ),
        [r(5, 4), r(5, 4, seed=1), r(5, 4, seed=2)],
    ),
    (
        "cosine embedding",
        lambda a, b, t: F.cosine_embedding_loss(a, b, 1 - 2 * t, margin=0.1, reduction="sum"),
        [r(5, 4), r(5, 4, seed=1), i(5, high=2)],
    ),
    ("ctc", lambda x, t: F.ctc_loss(x, t, [6, 5, 6, 4, 6], COUNTS), [LOGS, LABELS]),
    (
        "ctc_loss, concatenated targets",
        lambda x, t: F.ctc_loss(x, t, [6] * 5, COUNTS, reduction="sum"),
        [LOGS, i(11, high=3) + 1],
    ),
    ("native batch norm", batch_norm, [r(5, 3, 2), r(3), r(3, seed=1)]),
    ("native group norm", lambda x, w: torch.native_group_norm(x, w, None, 5, 4, 3, 2, 1e-5), [r(5, 4, 3), r(4)]),
    ("native layer norm", lambda x, w: torch.native_layer_norm(x, [4], w, None, 1e-5), [r(5, 4), r(4)]),
    ("safe softmax", lambda x: torch._safe_softmax(x.masked_fill(x > 0, -torch.inf), 1), [r(5, 2)]),
    ("bags, means", lambda t, w: F.embedding_bag(t, w, padding_idx=1), [i(5, 3, high=6), r(6, 4)]),
    ("bags, greatest", lambda t, w: F.embedding_bag(t, w, mode="max"), [i(5, 3, high=6), r(6, 4)]),
    ("masked mean", lambda x: torch.masked.mean(x, 0), [r(5, 4)]),
    ("masked spread", lambda x, m: torch.masked.std(x, 1, mask=m > 0), [r(5, 4), i(5, 4, high=3)]),
    ("unravel_index", lambda t: torch.unravel_index(t, (2, 3)), [i(5, high=6)]),
    ("cosine_similarity of scalars", lambda x, y: F.cosine_similarity(x, y, dim=0), [r(), r(seed=1)]),
    ("filled", lambda x: (x * 2).fill_(3.0) + x, [r(5, 4)]),
]


def test_values_and_gradients_match_torch_for_every_placement(against_torch: Any) -> None:
    against_torch((3,), CASES, max_combinations=12)
    against_torch((2, 2), CASES, max_combinations=6)


def test_batch_norm_of_a_sharded_batch_exchanges_only_statistics() -> None:
    def on_a_rank() -> tuple[int, tuple[Any, ...]]:
        mesh = sw.init_device_mesh("cpu", (4,))
        x = sw.rand(64, 8, 16, mesh=mesh, placements=[S(0)])
        means, spreads = (sw.zeros(8, mesh=mesh) for _ in range(2))
        with sw.trace() as seen:
            out, _, _ = torch.native_batch_norm(x, None, None, means, spreads, True, 0.1, 1e-5)
        return seen.received, out.placements

    received, placements = run_ranks(4, on_a_rank)[0]
    assert placements == (S(0),)
    assert 0 < received <= 2 * 2 * 8 * 4  # two sums of 8 floats, reduced and all-gathered


def test_embedding_bag_of_a_table_sharded_by_rows_does_not_communicate() -> None:
    def on_a_rank() -> tuple[int, tuple[Any, ...]]:
        mesh = sw.init_device_mesh("cpu", (4,))
        table = sw.rand(10, 3, mesh=mesh, placements=[S(0)])
        bags = sw.distribute_tensor(i(6, 4, high=10), mesh, [R])
        with sw.trace() as seen:
            out = F.embedding_bag(bags, table, mode="mean")
        return seen.received, out.placements

    assert run_ranks(4, on_a_rank)[0] == (0, (P(),))


@on_ranks(3)
def test_random_fills_of_partial_sums_match_replicated_tensors() -> None:
    mesh = sw.init_device_mesh("cpu", (3,))
    for draw in ("uniform_", "normal_", "exponential_", "log_normal_", "cauchy_"):
        found = []
        for placement in (R, P(), P("avg"), P("max"), S(0)):
            whole = sw.DTensor.from_local(torch.ones(4, 2), mesh, [placement if placement.is_partial() else R])
            x = whole.redistribute(mesh, [placement])
            sw.manual_seed(3)
            assert getattr(x, draw)() is x
            assert x.placements == (placement,)
            found.append(x.full_tensor())
        for other in found[1:]:
            torch.testing.assert_close(other, found[0])


@on_ranks(2)
def test_python_functions_draw_the_same_random_numbers_on_every_rank() -> None:
    mesh = sw.init_device_mesh("cpu", (2,))
    torch.rand(comm.rank())  # the ranks' own generators differ
    whole = r(6, 4).detach()
    sw.manual_seed(0)
    u, s, v = torch.svd_lowrank(sw.distribute_tensor(whole, mesh, [S(0)]), 4)
    torch.testing.assert_close((u * s @ v.mT).full_tensor(), whole)
    seen = comm.gather_bytes(v.full_tensor().numpy().tobytes(), group=comm.world(), what="comparing")
    assert seen[0] == seen[1]


@on_ranks(2)
def test_plain_user_tensors_raise_in_functions_and_callbacks() -> None:
    """Tensors that torch creates internally are replicated; those of the user, or of a user's callback, are not."""
    mesh = sw.init_device_mesh("cpu", (2,))
    x, plain = sw.distribute_tensor(r(4, 4).detach(), mesh, [S(0)]), r(4, 4).detach()
    linear = nn.Bilinear(4, 4, 1, dtype=torch.float64)
    calls: list[Any] = [
        lambda: torch.masked.mean(x, 0, mask=plain > 0),
        lambda: torch.masked.var(x, 0, mask=plain > 0),
        lambda: torch.svd_lowrank(x, 2, M=plain),
        lambda: F.triplet_margin_with_distance_loss(x, x, x, distance_function=lambda a, b: (a - b - plain).sum(-1)),
        lambda: F.triplet_margin_with_distance_loss(x, x, x, distance_function=linear),
        lambda: F.multi_head_attention_forward(x, x, x, 4, 2, plain, None, None, None, False, 0.0, plain, None),
        lambda: nn.Linear(4, 4, dtype=torch.float64)(x),
        lambda: nn.PairwiseDistance()(x, plain),
    ]
    for call in calls:
        with pytest.raises(MixedTensorsError, match="plain tensor"):
            call()


MODELS: dict[str, Any] = {
    "encoder": (
        lambda: nn.TransformerEncoder(_layer(nn.TransformerEncoderLayer), 2),
        lambda model, x, mask: model(x, mask=mask, is_causal=True),
    ),
    "decoder": (
        lambda: nn.TransformerDecoder(_layer(nn.TransformerDecoderLayer, norm_first=True), 2),
        lambda model, x, mask: model(x, 2 * x, tgt_mask=mask),
    ),
    "both": (
        lambda: nn.Transformer(8, 2, 1, 1, 16, 0.0, batch_first=True, dtype=torch.float64),
        lambda model, x, mask: model(x, 2 * x, tgt_mask=mask),
    ),
    "attention": (
        lambda: nn.MultiheadAttention(8, 2, add_bias_kv=True, add_zero_attn=True, dtype=torch.float64),
        lambda model, x, mask: torch.cat([part.flatten() for part in model(x, x, x)]),
    ),
}


def _layer(kind: Any, **options: Any) -> Any:
    return kind(8, 2, 16, dropout=0.0, batch_first=True, dtype=torch.float64, **options)


@pytest.mark.parametrize("name", MODELS)
def test_transformers_train_and_infer_as_on_one_device(name: str) -> None:
    make, call = MODELS[name]

    def shard_weights(_: str, module: nn.Module, mesh: Any) -> None:
        for key, value in list(module.named_parameters(recurse=False)):
            setattr(module, key, nn.Parameter(sw.distribute_tensor(value.detach(), mesh, [S(0)])))

    def on_a_rank() -> None:
        mesh = sw.init_device_mesh("cpu", (4,))
        whole, mask = r(5, 6, 8).detach(), nn.Transformer.generate_square_subsequent_mask(6, dtype=torch.float64)
        for placement, cut in ((R, shard_weights), (S(0), None), (S(0), shard_weights), (S(1), None), (S(2), None)):
            torch.manual_seed(0)
            plain = make()
            ours = sw.distribute_module(deepcopy(plain), mesh, cut)
            x, rows = (sw.distribute_tensor(t, mesh, [p]) for t, p in ((whole, placement), (mask, R)))
            found, expected = call(ours, x, rows), call(plain, whole, mask)
            torch.testing.assert_close(found.full_tensor(), expected)
            found.sin().sum().backward()
            expected.sin().sum().backward()
            for mine, theirs in zip(ours.parameters(), plain.parameters(), strict=True):
                torch.testing.assert_close(mine.grad.full_tensor(), theirs.grad)  # type: ignore[union-attr]  # DTensors'
            with torch.no_grad():  # where torch takes its fast path
                answer = call(ours.eval(), x, rows)
                torch.testing.assert_close(answer.full_tensor(), call(plain.eval(), whole, mask))

    run_ranks(4, on_a_rank, timeout=120)


RETURN_TYPES: dict[str, Any] = {
    "max": lambda x: torch.max(x, 0),
    "min": lambda x: torch.min(x, 1, keepdim=True),
    "median": lambda x: torch.median(x, 0),
    "mode": lambda x: torch.mode(x, 1),
    "sort": lambda x: torch.sort(x, 0),
    "topk": lambda x: torch.topk(x, 2, 0),
    "kthvalue": lambda x: torch.kthvalue(x, 2, 1),
    "cummax": lambda x: torch.cummax(x, 0),
    "aminmax": lambda x: torch.aminmax(x, dim=0),
    "slogdet": lambda x: torch.linalg.slogdet(x.expand(2, 3, 3)),
    "svd": lambda x: torch.linalg.svd(x),
    "qr": lambda x: torch.linalg.qr(x),
    "frexp": lambda x: torch.frexp(x),
}


@on_ranks(2)
def test_return_types_match_torch() -> None:
    mesh = sw.init_device_mesh("cpu", (2,))
    whole = r(3, 3).detach()
    for name, call in RETURN_TYPES.items():
        expected = call(whole)
        for placement in (R, S(0), S(1)):
            found = call(sw.distribute_tensor(whole, mesh, [placement]))
            assert type(found) is type(expected), (name, placement, type(found))
            for field in range(expected.n_fields):
                assert isinstance(found[field], sw.DTensor), name
                assert found[field].shape == expected[field].shape, name
