"""Rules for operators of users: registered, proved, used, taken back; errors say what is wrong with them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import shardwright as sw
from shardwright import comm
from shardwright.errors import RuleError
from shardwright.rules import Decided, Operand, Way, Ways, either, index_ways, indexed, pointwise
from shardwright.tensor.dispatch.registry import canonical_name
from shardwright.testing import prove, run_ranks


def define(name: str) -> Any:
    """An operator `a @ b * scale` with a gradient of its own; defined once in each process."""
    defined = vars(torch)["ops"].swtests  # not torch.ops: cloudpickle would take it along
    if hasattr(defined, name):
        return getattr(defined, name)

    @torch.library.custom_op(f"swtests::{name}", mutates_args=(), schema="(Tensor a, Tensor b, float scale) -> Tensor")
    def product(a: Tensor, b: Tensor, scale: float) -> Tensor:
        return a @ b * scale

    def save(ctx: Any, inputs: Any, output: Tensor) -> None:
        ctx.save_for_backward(*inputs[:2])
        ctx.scale = inputs[2]

    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        a, b = ctx.saved_tensors
        return gradient @ b.T * ctx.scale, a.T @ gradient * ctx.scale, None

    product.register_autograd(backward, setup_context=save)
    return product


@pytest.fixture
def product() -> Iterator[Any]:
    op = define("product")
    with sw.register_rule(op, indexed("mk,kn->mn", linear=[[0, 1]])):
        yield op


def on_one_rank(*placements: sw.Placement, shape: tuple[int, ...] = (4, 3)) -> sw.DTensor:
    return sw.ones(*shape, mesh=sw.init_device_mesh("cpu", (1,)), placements=placements or [sw.Shard(0)])


def test_a_users_rule_is_proved_in_one_call(product: Any) -> None:
    proof = prove(product, torch.randn(5, 4), torch.randn(4, 2), 0.5)
    assert not proof.wrong, proof
    assert len(proof.proved) >= 5


@pytest.mark.parametrize("op", [lambda: torch.ops.swtests.product, lambda: torch.ops.swtests.product.default])
def test_every_spelling_of_an_operator_has_the_rule(product: Any, op: Any) -> None:
    assert canonical_name(op()) == canonical_name(product) == ("swtests::product", False)
    with sw.trace() as seen:
        assert op()(on_one_rank(), on_one_rank(sw.Replicate(), shape=(3, 2)), 2.0).placements == (sw.Shard(0),)
    assert not seen.operations[0].fell_back


def train_by_rule(with_rule: bool) -> None:
    op, mesh = define("trained"), sw.init_device_mesh("cpu", (comm.world().size,))
    torch.manual_seed(1)  # the same on every rank
    a, b = torch.randn(5, 4, dtype=torch.float64), torch.randn(4, 3, dtype=torch.float64)
    whole = [a.clone().requires_grad_(), b.clone().requires_grad_()]
    expected = op(*whole, 0.5)
    expected.square().sum().backward()
    registered = sw.register_rule(op, indexed("mk,kn->mn", linear=[[0, 1]])) if with_rule else None
    try:
        for placements in ((sw.Shard(0), sw.Replicate()), (sw.Shard(1), sw.Shard(0)), (sw.Replicate(), sw.Shard(1))):
            x, w = (
                sw.distribute_tensor(value, mesh, [p]).requires_grad_()
                for value, p in zip((a, b), placements, strict=True)
            )
            with sw.trace() as seen:
                y = op(x, w, 0.5)
            assert seen.operations[0].fell_back is not with_rule
            assert not with_rule or seen.received == 0
            torch.testing.assert_close(y.full_tensor(), expected)
            y.square().sum().backward()
            torch.testing.assert_close(x.grad.full_tensor(), whole[0].grad)
            torch.testing.assert_close(w.grad.full_tensor(), whole[1].grad)
    finally:
        if registered is not None:
            registered.remove()


@pytest.mark.parametrize("with_rule", [True, False])
def test_custom_operators_and_their_gradients_on_ranks(with_rule: bool) -> None:
    run_ranks(3, train_by_rule, with_rule)


def test_a_name_of_ones_own_is_not_that_of_torchs() -> None:
    @torch.library.custom_op("swtests::relu", mutates_args=())
    def relu(x: Tensor) -> Tensor:
        return x - 1

    x = on_one_rank()
    assert relu(x).tolist()[0] == [0.0, 0.0, 0.0]
    with sw.register_rule(relu, pointwise()):
        assert relu(x).placements == (sw.Shard(0),)
        assert torch.relu(x).tolist()[0] == [1.0, 1.0, 1.0]


def test_a_registration_ends_and_plans_end_with_it() -> None:
    op, x, w = define("ending"), on_one_rank(), on_one_rank(sw.Replicate(), shape=(3, 2))
    assert op(x, w, 1.0).placements == (sw.Replicate(),)
    with sw.register_rule(op, "mk,kn->mn"):
        for _ in range(2):
            assert op(x, w, 1.0).placements == (sw.Shard(0),)
        with pytest.raises(RuleError, match="swtests::ending has a rule already: give replace=True"):
            sw.register_rule(op, "mk,kn->mn")
        with sw.register_rule(op, lambda a, b, scale: None, replace=True):
            assert op(x, w, 1.0).placements == (sw.Replicate(),)
        assert op(x, w, 1.0).placements == (sw.Shard(0),)
    assert op(x, w, 1.0).placements == (sw.Replicate(),)
    outer = sw.register_rule(op, "mk,kn->mn")
    inner = sw.register_rule(op, "mk,kn->mn", replace=True)
    outer.remove()  # it has been replaced: nothing happens
    assert op(x, w, 1.0).placements == (sw.Shard(0),)
    inner.remove()
    outer.remove()


def test_a_rule_of_torchs_own_is_replaced_and_comes_back() -> None:
    x = on_one_rank()
    assert (x + x).placements == (sw.Shard(0),)
    with sw.register_rule(torch.add, lambda *_, **__: None, replace=True):
        assert (x + x).placements == (sw.Replicate(),)
    assert (x + x).placements == (sw.Shard(0),)


def test_a_rule_as_a_function_of_the_operators_signature() -> None:
    op = define("decorated")

    @sw.register_rule(op)
    def rule(a: Operand, b: Operand, scale: float) -> Ways | None:
        return Ways(index_ways([a, b], ["mk", "kn"], ["mn"]), shapes=((a.shape[0], b.shape[1]),)) if scale else None

    w = on_one_rank(sw.Replicate(), shape=(3, 2))
    assert op(on_one_rank(), w, 1.0).placements == (sw.Shard(0),)
    assert op(on_one_rank(), w, 0.0).placements == (sw.Replicate(),)


@pytest.mark.parametrize(
    ("rule", "why"),
    [
        (either(Way((sw.Shard(0),), (sw.Shard(0),))), r"the rule has 1 inputs \(R\), the call 2"),
        (either(Way((sw.Shard(0), sw.Replicate()), ())), r"the rule has 0 outputs \(\), the call 1"),
        (either(Way(("S(0)", "R"), (sw.Shard(0),))), "for its inputs: each is a Placement"),
        (lambda a, b, scale: "mk,kn->mn", "the rule returned a str: return Ways, Decided, or None"),
        (lambda a, b, scale: Decided((a.layout,), (a.layout,)), "the rule has 1 inputs"),
        ("m,n->mn", r"'m,n->mn': 'm' stands for a tensor of 2 dimensions, \(4, 3\)"),
        ("mk->mk", "'mk->mk' has 1 inputs, the call 2 tensors"),
    ],
)
def test_answers_that_make_no_sense_are_refused(rule: Any, why: str) -> None:
    op = define("senseless")
    with sw.register_rule(op, rule), pytest.raises(RuleError, match=why):
        op(on_one_rank(), on_one_rank(shape=(3, 2)), 1.0)


@pytest.mark.parametrize("notation", ["mk,kn", "mm->m", "mk->mn", "m2->m", "mk,kn->mnn"])
def test_what_is_no_index_notation_is_refused(notation: str) -> None:
    with pytest.raises(RuleError, match="is no index notation"):
        indexed(notation)


def test_other_registrations_that_are_refused() -> None:
    @torch.library.custom_op("swtests::writes", mutates_args=("x",))
    def writes(x: Tensor) -> None:
        x.zero_()

    with pytest.raises(RuleError, match="swtests::writes writes to its arguments"):
        sw.register_rule(writes, pointwise())
    with pytest.raises(RuleError, match="is no operator of torch"):
        sw.register_rule(define, pointwise())
    with pytest.raises(RuleError, match="3 is no rule"):
        sw.register_rule(define("numbered"), 3)
    with pytest.raises(RuleError, match="at least one way"):
        either()
    with pytest.raises(RuleError, match="names inputs by place, 0 to 1"):
        indexed("m,m->m", linear=[[2]])


@pytest.mark.parametrize(
    ("func", "args", "rule"),
    [
        (torch.matmul, (torch.randn(2, 4, 5), torch.randn(5, 3)), indexed("...mk,kn->...mn", linear=[[0, 1]])),
        (torch.matmul, (torch.randn(4, 2, 5), torch.randn(1, 5, 3)), indexed("bmk,bkn->bmn")),
        (torch.amax, (torch.randn(4, 5), 1), indexed("mk->m", reduces=None)),
        (torch.sort, (torch.randn(4, 5),), indexed("mk->mk,mk", whole="k")),
        (torch.sub, (torch.randn(4, 5), torch.randn(5)), pointwise([[0], [1]])),
        (torch.addcmul, (torch.randn(4, 5), torch.randn(5), torch.randn(4, 1)), pointwise([[0], [1, 2]])),
    ],
)
def test_the_helpers_make_true_rules(func: Any, args: Any, rule: Any) -> None:
    proof = prove(func, *args, rule=rule)
    assert proof.proved
    assert not proof.wrong, proof


def test_a_wrong_rule_of_a_user_is_found() -> None:
    op = define("careless")
    with sw.register_rule(op, indexed("mk,kn->mn", linear=[[0], [1]])):
        assert prove(op, torch.randn(5, 4), torch.randn(4, 2), 0.5).wrong
