"""The prover finds planted wrong rules, each with its reason, and accepts right ones."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from shardwright.errors import TensorError
from shardwright.layout import Layout, Partial, Placement, Replicate, Shard
from shardwright.tensor.base.strategy import (
    Local,
    LocalContext,
    MeshStrategy,
    Operand,
    Strategies,
    Strategy,
    index_strategies,
)
from shardwright.testing import prove

R, P = Replicate(), Partial()


def randn(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(sum(shape)))


def strategies(*listed: Strategy) -> Strategies:
    return Strategies(lambda mesh_dim: list(listed))


def strategy(ins: Placement | tuple[Placement, ...], outs: Placement) -> Strategy:
    return Strategy(ins if isinstance(ins, tuple) else (ins,), (outs,))


def mesh_strategy(
    operands: list[Operand], placements: list[Placement], out: Placement, shape: tuple[int, ...]
) -> MeshStrategy:
    mesh = operands[0].layout.mesh
    layouts = [Layout(mesh, [p], operand.shape) for p, operand in zip(placements, operands, strict=True)]
    return MeshStrategy(tuple(layouts), (Layout(mesh, [out], shape),))


def own_shard(context: LocalContext) -> Local:
    """What a rule might do that cuts a replicate locally."""
    region = context.outs[0].region(context.rank)
    return lambda func, args, kwargs: func(args[0])[region.slices()]


def mean_of_asker(x: Operand) -> Strategies:
    """It looks at where the input is when asked, not at where it is when run."""
    count = 4 if x.layout.placements[0].is_shard() else 1
    local = lambda context: lambda func, args, kwargs: args[0].sum(0) / count  # noqa: E731  # as short as it is wrong
    return Strategies(
        lambda _: [strategy(R, R), strategy(Shard(0), P)], run=lambda s: local(s) if s.ins[0].cut_by(0) else None
    )


PLANTED: dict[str, tuple[Any, tuple[Any, ...], Any, str]] = {
    "a non-linear operator on partial values": (
        torch.relu,
        (randn(5),),
        lambda x: strategies(strategy(P, P)),
        "output 0",
    ),
    "a partial value plus a replicated one": (
        torch.add,
        (randn(4), randn(4)),
        lambda x, y: strategies(strategy((P, R), P)),
        "output 0",
    ),
    "a constant added to partial values": (
        torch.add,
        (randn(4), 1.0),
        lambda x, n: strategies(strategy(P, P)),
        "output 0",
    ),
    "a product of two partial sums": (
        torch.mul,
        (randn(4), randn(4)),
        lambda x, y: strategies(strategy((P, P), P)),
        "output 0",
    ),
    "softmax sharded along its dimension": (
        torch.softmax,
        (randn(4, 2), 0),
        lambda x, d: strategies(strategy(Shard(0), Shard(0))),
        "output 0",
    ),
    "a mean of means of uneven shards": (
        torch.mean,
        (randn(4, 2), 0),
        lambda x, d: strategies(strategy(Shard(0), Partial("avg"))),
        "output 0",
    ),
    "a sharded contraction declared replicated": (
        torch.mm,
        (
            randn(2, 4),
            randn(4, 2),
        ),
        lambda x, y: strategies(strategy((Shard(1), Shard(0)), R)),
        "output 0 is R, but on rank",
    ),
    "the wrong dimension of the output": (
        torch.t,
        (randn(4, 4),),
        lambda x: replace(strategies(strategy(Shard(0), Shard(0))), fresh=False),
        "has shape",
    ),
    "a missing dimension": (
        torch.sum,
        (randn(4),),
        lambda x: strategies(strategy(R, Shard(1))),
        "layouts are invalid",
    ),
    "too few outputs": (
        torch.sum,
        (randn(4),),
        lambda x: Strategies(lambda _: [Strategy((R,), ())]),
        "1 inputs and 0 outputs",
    ),
    "a maximum without a possible gradient": (
        torch.amax,
        (randn(6), 0),
        lambda x, d: strategies(strategy(Shard(0), Partial("max"))),
        "no gradient",
    ),
    "a wrong strategy after a right one": (
        torch.abs,
        (randn(4),),
        lambda x: strategies(strategy(R, R), strategy(Shard(0), Shard(0)), strategy(Shard(0), P)),
        "has shape",
    ),
    "a rule that raises": (torch.abs, (randn(4),), lambda x: {}["no"], "raised KeyError"),
    "a local call that depends on the original placement": (
        torch.mean,
        (randn(4), 0),
        lambda x, d: mean_of_asker(x),
        "output 0",
    ),
    "a view declared a new tensor": (
        torch.t,
        (randn(4, 2),),
        lambda x: Strategies(index_strategies([x], ["ab"], ["ba"])),
        "is a view",
    ),
}
GRADIENTS: dict[str, tuple[Any, tuple[Any, ...], Any]] = {
    "a replicate beside a shard that does not enter": (
        torch.mm,
        (randn(4, 2), randn(2, 4)),
        lambda x, y: mesh_strategy([x, y], [Shard(0), R], Shard(0), (4, 4)),
    ),
    "a replicate beside a partial sum that does not enter": (
        torch.mul,
        (randn(4), randn(4)),
        lambda x, y: mesh_strategy([x, y], [P, R], P, (4,)),
    ),
    "a replicate that is sliced": (
        torch.sin,
        (randn(4),),
        lambda x: Strategies(lambda _: [strategy(R, Shard(0))], run=own_shard),
    ),
    "a local call that detaches": (
        torch.sin,
        (randn(4),),
        lambda x: Strategies(lambda _: [strategy(R, R)], run=lambda _: lambda f, a, k: f(a[0].detach())),
    ),
    "a local call with a wrong gradient": (
        torch.relu,
        (randn(4),),
        lambda x: Strategies(
            lambda _: [strategy(Shard(0), Shard(0))],
            run=lambda _: lambda f, a, k: a[0] + (f(a[0]) - a[0]).detach(),
        ),
    ),
}


@pytest.mark.parametrize(("func", "args", "rule", "said"), PLANTED.values(), ids=PLANTED.keys())
def test_prove_finds_a_wrong_rule(func: Any, args: tuple[Any, ...], rule: Any, said: str) -> None:
    proof = prove(func, *args, rule=rule)
    assert proof.wrong, proof
    assert said in " ".join(str(verdict) for verdict in proof.wrong)
    assert "WRONG" in str(proof)


@pytest.mark.parametrize(("func", "args", "rule"), GRADIENTS.values(), ids=GRADIENTS.keys())
def test_prove_finds_wrong_gradients_of_a_rule_with_right_values(func: Any, args: tuple[Any, ...], rule: Any) -> None:
    proof = prove(func, *args, rule=rule)
    assert proof.wrong, proof
    assert all(verdict.gradient and "gradient of input" in (verdict.fault or "") for verdict in proof.wrong), proof


def test_prove_lists_the_proved_strategies_of_a_right_rule() -> None:
    proof = prove(torch.mm, randn(4, 2), randn(2, 5))
    said = {(verdict.ins, verdict.outs) for verdict in proof.proved}
    assert not proof.wrong, proof
    assert {((R, R), (R,)), ((Shard(1), Shard(0)), (P,)), ((P, R), (P,))} <= said
    assert (P, P) in proof.declined
    assert proof.left_out == 0


def test_in_place_writes_that_change_the_targets_layout_are_declined() -> None:
    proof = prove(torch.Tensor.t_, randn(2, 4))
    assert not proof.verdicts
    assert (R,) in proof.declined
    assert (P, R) in prove(torch.Tensor.add_, randn(4), randn(4)).declined


def test_prove_counts_the_placements_it_leaves_out_for_many_inputs() -> None:
    def rule(tensors: list[Operand]) -> Strategies:
        return strategies(strategy((R,) * 4, R))

    proof = prove(torch.cat, [randn(2) for _ in range(4)], rule=rule)
    assert not proof.wrong, proof
    assert proof.left_out > 0
    assert f"{proof.left_out} left out" in str(proof)


def test_an_operator_without_gradient_is_proved_by_its_values() -> None:
    proof = prove(torch.sign, torch.tensor([1, -2, 0, 4]))
    assert not proof.wrong
    assert not any(verdict.gradient for verdict in proof.verdicts)


def unattached_where_empty(context: LocalContext) -> Local:
    """What torch's own kernels do of nothing: a result that hangs on no input."""
    return lambda func, args, kwargs: func(*args) if args[0].numel() else torch.empty(0, dtype=args[0].dtype)


def test_prove_finds_a_rank_that_would_skip_the_backward_pass() -> None:
    rule = lambda x: replace(strategies(strategy(Shard(0), Shard(0))), run=unattached_where_empty)  # noqa: E731  # short
    (fault,) = {verdict.fault for verdict in prove(torch.exp, randn(2), rule=rule).wrong}
    assert fault == "output 0 depends on the inputs on some ranks, but not on others"


def test_prove_checks_gradients_only_of_inputs_that_require_grad() -> None:
    proof = prove(torch.mul, randn(4).requires_grad_(), randn(4))
    entered = [verdict.ins for verdict in proof.proved if verdict.gradient and verdict.ins[0] == P]
    assert entered == [(P, R)]  # nobody asks for the second one's gradient: it need not enter


def test_prove_of_an_operator_without_a_rule_raises() -> None:
    def nobodys_operator(x: Tensor) -> Tensor:
        return x

    with pytest.raises(TensorError, match="nobodys_operator has no rule to prove"):
        prove(nobodys_operator, randn(2, 2))
    with pytest.raises(TensorError, match="the arguments contain no tensor"):
        prove(torch.add, 1, 2)


def test_prove_raises_torchs_error_for_an_invalid_call() -> None:
    with pytest.raises(RuntimeError, match="cannot be multiplied"):
        prove(torch.mm, randn(2, 3), randn(2, 3))
