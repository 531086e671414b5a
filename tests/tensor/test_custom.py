"""User-defined rules: registering, proving, using and removing them, and the errors of wrong ones."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import shardwright as sw
from shardwright import comm
from shardwright.errors import RuleError
from shardwright.rules import MeshStrategy, Operand, Strategies, Strategy, either, index_strategies, indexed, pointwise
from shardwright.tensor.base.registry import canonical_name
from shardwright.testing import prove, run_ranks


def define(name: str) -> Any:
    """An operator `a @ b * scale` with a gradient of its own; defined once in each process."""
    defined = vars(torch)["ops"].swtests  # not torch.ops, which cloudpickle would pickle
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


def test_prove_accepts_a_correct_custom_rule(product: Any) -> None:
    proof = prove(product, torch.randn(5, 4), torch.randn(4, 2), 0.5)
    assert not proof.wrong, proof
    assert len(proof.proved) >= 5


@pytest.mark.parametrize("op", [lambda: torch.ops.swtests.product, lambda: torch.ops.swtests.product.default])
def test_all_overloads_of_a_custom_operator_use_its_rule(product: Any, op: Any) -> None:
    assert canonical_name(op()) == canonical_name(product) == ("swtests::product", False)
    with sw.trace() as seen:
        assert op()(on_one_rank(), on_one_rank(sw.Replicate(), shape=(3, 2)), 2.0).placements == (sw.Shard(0),)
    assert not seen.operations[0].fell_back


def gradients_with_and_without_rule(with_rule: bool) -> None:
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
def test_custom_operators_and_gradients_equal_the_local_ones(with_rule: bool) -> None:
    run_ranks(3, gradients_with_and_without_rule, with_rule)


def test_custom_operator_does_not_shadow_torchs_operator_of_the_same_name() -> None:
    @torch.library.custom_op("swtests::relu", mutates_args=())
    def relu(x: Tensor) -> Tensor:
        return x - 1

    x = on_one_rank()
    assert relu(x).tolist()[0] == [0.0, 0.0, 0.0]
    with sw.register_rule(relu, pointwise()):
        assert relu(x).placements == (sw.Shard(0),)
        assert torch.relu(x).tolist()[0] == [1.0, 1.0, 1.0]


def test_removing_a_rule_restores_the_previous_one_and_drops_cached_plans() -> None:
    op, x, w = define("ending"), on_one_rank(), on_one_rank(sw.Replicate(), shape=(3, 2))
    assert op(x, w, 1.0).placements == (sw.Replicate(),)
    with sw.register_rule(op, "mk,kn->mn"):
        for _ in range(2):
            assert op(x, w, 1.0).placements == (sw.Shard(0),)
        with pytest.raises(RuleError, match="swtests::ending already has a rule: pass replace=True"):
            sw.register_rule(op, "mk,kn->mn")
        with sw.register_rule(op, lambda a, b, scale: None, replace=True):
            assert op(x, w, 1.0).placements == (sw.Replicate(),)
        assert op(x, w, 1.0).placements == (sw.Shard(0),)
    assert op(x, w, 1.0).placements == (sw.Replicate(),)
    outer = sw.register_rule(op, "mk,kn->mn")
    inner = sw.register_rule(op, "mk,kn->mn", replace=True)
    outer.remove()  # already replaced: no effect
    assert op(x, w, 1.0).placements == (sw.Shard(0),)
    inner.remove()
    outer.remove()


def test_builtin_rule_can_be_replaced_and_restored() -> None:
    x = on_one_rank()
    assert (x + x).placements == (sw.Shard(0),)
    with sw.register_rule(torch.add, lambda *_, **__: None, replace=True):
        assert (x + x).placements == (sw.Replicate(),)
    assert (x + x).placements == (sw.Shard(0),)


def test_rule_as_a_function_of_the_operators_signature() -> None:
    op = define("decorated")

    @sw.register_rule(op)
    def rule(a: Operand, b: Operand, scale: float) -> Strategies | None:
        return (
            Strategies(index_strategies([a, b], ["mk", "kn"], ["mn"]), shapes=((a.shape[0], b.shape[1]),))
            if scale
            else None
        )

    w = on_one_rank(sw.Replicate(), shape=(3, 2))
    assert op(on_one_rank(), w, 1.0).placements == (sw.Shard(0),)
    assert op(on_one_rank(), w, 0.0).placements == (sw.Replicate(),)


def columns(mesh_dim: int) -> list[Strategy]:
    return [Strategy((sw.Replicate(), sw.Shard(1)), (sw.Shard(1),))]


@pytest.mark.parametrize(
    ("rule", "why"),
    [
        (either(Strategy((sw.Shard(0),), (sw.Shard(0),))), r"the rule has 1 inputs \(R\), but the call has 2"),
        (either(Strategy((sw.Shard(0), sw.Replicate()), ())), r"the rule has 0 outputs \(\), but the call has 1"),
        (either(Strategy(("S(0)", "R"), (sw.Shard(0),))), "inputs must all be of type Placement, got"),
        (lambda a, b, scale: "mk,kn->mn", "the rule must return Strategies, MeshStrategy or None, got str"),
        (lambda a, b, scale: MeshStrategy((a.layout,), (a.layout,)), "the rule has 1 inputs"),
        ("m,n->mn", r"'m,n->mn': 'm' does not fit a tensor of 2 dimensions, \(4, 3\)"),
        ("mk->mk", "'mk->mk' has 1 inputs, but the call has 2 tensors"),
        (pointwise([[3]]), r"pointwise\(\[\[3\]\]\): linear=\[\[3\]\] has 3, but indices of inputs are 0 to 1"),
        (
            lambda a, b, scale: Strategies(lambda mesh_dim: []),
            "the rule <lambda> has no strategies on mesh dimension 0: list at least",
        ),
        (lambda a, b, scale: Strategies(columns, shapes=()), r"gives 0 shapes, \(\), but the call has 1 outputs"),
        (
            lambda a, b, scale: Strategies(columns, shapes=((4,),)),
            r"S\(1\) for output 0, of shape \(4,\), which does not",
        ),
    ],
)
def test_malformed_answers_of_a_rule_raise(rule: Any, why: str) -> None:
    op = define("malformed")
    with sw.register_rule(op, rule), pytest.raises(RuleError, match=f"swtests::malformed: .*{why}"):
        op(on_one_rank(), on_one_rank(shape=(3, 2)), 1.0)


def test_strategies_for_missing_dimensions_are_skipped() -> None:
    op = define_twice("twice_of_any", fake=True)
    rows, number = Strategy((sw.Shard(0),), (sw.Shard(0),)), on_one_rank(sw.Replicate(), shape=())
    with sw.register_rule(op, either(rows, Strategy((sw.Shard(1),), (sw.Shard(1),)))):
        assert op(number).placements == (sw.Replicate(),)
        assert op(on_one_rank(shape=(4,))).placements == (sw.Shard(0),)
    why = r"swtests::twice_of_any: the rule <lambda> has no strategy for inputs of shapes \(\).* \(S\(0\) -> S\(0\)\)"
    with sw.register_rule(op, lambda x: Strategies(lambda mesh_dim: [rows])):
        assert op(on_one_rank(shape=(4,))).placements == (sw.Shard(0),)
        with pytest.raises(RuleError, match=why):
            op(number)


@pytest.mark.parametrize("notation", ["mk,kn", "mm->m", "mk->mn", "m2->m", "mk,kn->mnn"])
def test_invalid_index_notation_raises(notation: str) -> None:
    with pytest.raises(RuleError, match="is not an index notation"):
        indexed(notation)


def test_invalid_registrations_raise() -> None:
    @torch.library.custom_op("swtests::writes", mutates_args=("x",))
    def writes(x: Tensor) -> None:
        x.zero_()

    with pytest.raises(RuleError, match="swtests::writes writes to its arguments"):
        sw.register_rule(writes, pointwise())
    with pytest.raises(RuleError, match="is not an operator of torch"):
        sw.register_rule(define, pointwise())
    with pytest.raises(RuleError, match="function of the operator's signature, got 3"):
        sw.register_rule(define("numbered"), 3)
    with pytest.raises(RuleError, match="at least one strategy"):
        either()
    with pytest.raises(RuleError, match=r"linear=\[\[2\]\] has 2, but indices of inputs are 0 to 1"):
        indexed("m,m->m", linear=[[2]])
    with pytest.raises(RuleError, match=r"'mk->m': reduces must be None or one of sum, avg, max, .*, got 'foo'"):
        indexed("mk->m", reduces="foo")
    with pytest.raises(RuleError, match="'mk->m': whole must be letters of the inputs, got 'z' in 'kz'"):
        indexed("mk->m", whole="kz")


@pytest.mark.parametrize("linear", [[[0], [-1]], [], [[]], [[0, 0]]])
@pytest.mark.parametrize("helper", [pointwise, lambda linear: indexed("m,m->m", linear=linear)])
def test_linear_terms_must_be_a_sum_of_products(helper: Any, linear: Any) -> None:
    with pytest.raises(RuleError, match=r"linear.* (but indices of inputs are|must be a sum of products)"):
        helper(linear)


def define_twice(name: str, fake: bool) -> Any:
    """An operator `2 * x`, with or without a kernel for meta tensors; defined once in each process."""
    defined = vars(torch)["ops"].swtests
    if hasattr(defined, name):
        return getattr(defined, name)

    @torch.library.custom_op(f"swtests::{name}", mutates_args=(), schema="(Tensor x) -> Tensor")
    def twice(x: Tensor) -> Tensor:
        return x * 2

    if fake:
        twice.register_fake(torch.empty_like)
    return twice


def wider(x: Operand) -> Strategies:
    return Strategies(index_strategies([x], ["mn"], ["mn"]), shapes=((8, 7),))


def false_replicate(x: Operand) -> Strategies:
    return Strategies(lambda mesh_dim: [Strategy((sw.Shard(0),), (sw.Replicate(),))], shapes=(x.shape,))


def mesh_strategy(x: Operand) -> MeshStrategy:
    return MeshStrategy((x.layout,), (x.layout.replace(placements=[sw.Replicate()]),))


def wrong_sizes_raise(fake: bool, rule: Any, layout: str, claimed: str) -> str:
    op = define_twice(f"twice_{fake}", fake)
    x = sw.ones(8, 6, mesh=sw.init_device_mesh("cpu", (4,)), placements=[sw.Shard(0)])
    with sw.register_rule(op, rule):
        for _ in range(2):  # a cached plan is checked as well
            with pytest.raises(RuleError) as error:
                op(x)
        message = str(error.value)
        assert f"swtests::twice_{fake}: the rule " in message
        assert f"claims {layout} for output 0 of inputs [8, 6] (0: S(0))" in message
        assert f"would have shape {claimed}, but has (2, 6): fix it, and prove it with" in message
        assert prove(op, torch.ones(8, 6)).wrong
    return message


@pytest.mark.parametrize("fake", [True, False])
@pytest.mark.parametrize(
    ("rule", "layout", "claimed"),
    [
        ("mn->m", "[8] (0: S(0))", "(2,)"),
        (wider, "[8, 7] (0: S(0))", "(2, 7)"),
        (false_replicate, "[8, 6] (0: R)", "(8, 6)"),
        (mesh_strategy, "[8, 6] (0: R)", "(8, 6)"),
    ],
)
def test_results_of_other_sizes_than_the_rule_claims_raise(fake: bool, rule: Any, layout: str, claimed: str) -> None:
    messages = run_ranks(4, wrong_sizes_raise, fake, rule, layout, claimed)
    assert len(set(messages)) == (1 if fake else 4)  # with a meta kernel, every rank raises the same error
    assert f"the rule {rule.__name__ if callable(rule) else f'indexed({rule!r})'} claims" in messages[0]


def wrong_on_rank_1() -> str:
    op = define_twice("twice_of_one_row", fake=True)
    x = sw.ones(1, 6, mesh=sw.init_device_mesh("cpu", (2,)), placements=[sw.Shard(0)])
    with sw.register_rule(op, false_replicate), pytest.raises(RuleError) as error:
        op(x)
    return str(error.value)


def test_sizes_wrong_on_one_rank_raise_on_all() -> None:
    first, second = run_ranks(2, wrong_on_rank_1)
    assert first == second
    assert "On rank 1 its local tensor would have shape (1, 6), but has (0, 6)" in first


def captured(fake: bool) -> None:
    op = define_twice(f"captured_twice_{fake}", fake)
    x = sw.ones(5, 3, mesh=sw.init_device_mesh("cpu", (2,)), placements=[sw.Shard(0)])
    with sw.register_rule(op, pointwise([[0]])):
        compiled = sw.compile(lambda x: op(x) + 1)
        for factor in (1, 2):
            assert compiled(x * factor).full_tensor().tolist() == [[2.0 * factor + 1] * 3] * 5


@pytest.mark.parametrize("fake", [True, False])
def test_custom_operators_can_be_compiled(fake: bool) -> None:
    run_ranks(2, captured, fake)


def test_wrong_number_of_results_raises() -> None:
    name = "swtests::halves"
    torch.library.define(name, "(Tensor x) -> Tensor[]")
    torch.library.impl(name, "CPU", lambda x: [x / 2, x / 2])
    with (
        sw.register_rule(torch.ops.swtests.halves, "mn->mn"),
        pytest.raises(RuleError, match=r"swtests::halves: the rule .* claims 1 outputs .*, but rank 0 has 2: "),
    ):
        torch.ops.swtests.halves(on_one_rank())


def test_sizes_of_other_ranks_are_checked_once_per_plan() -> None:
    checked_shapes = []

    @torch.library.custom_op("swtests::counted", mutates_args=())
    def counted(x: Tensor) -> Tensor:
        return x.clone()

    @counted.register_fake
    def _(x: Tensor) -> Tensor:
        checked_shapes.append(x.shape)
        return torch.empty_like(x)

    x = on_one_rank()
    with sw.register_rule(counted, pointwise()):
        for _ in range(3):
            assert counted(x).placements == (sw.Shard(0),)
    assert checked_shapes == [(4, 3)]


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
def test_rule_helpers_give_correct_rules(func: Any, args: Any, rule: Any) -> None:
    proof = prove(func, *args, rule=rule)
    assert proof.proved
    assert not proof.wrong, proof


def test_prove_finds_a_wrong_custom_rule() -> None:
    op = define("wrong")
    with sw.register_rule(op, indexed("mk,kn->mn", linear=[[0], [1]])):
        assert prove(op, torch.randn(5, 4), torch.randn(4, 2), 0.5).wrong


def test_strategies_without_a_valid_combination_raise() -> None:
    op = define("incompatible")
    rows = sw.Ragged(0, (4,))
    mesh = sw.init_device_mesh("cpu", (1, 1))
    a, b = sw.ones(4, 3, mesh=mesh), sw.ones(3, 2, mesh=mesh)
    with (
        sw.register_rule(
            op, lambda *_: Strategies(lambda _: [Strategy((rows, sw.Replicate()), (rows,))], shapes=((4, 2),))
        ),
        pytest.raises(RuleError, match="no strategy of the rule for mesh dimension 1 is compatible with those chosen"),
    ):
        op(a, b, 1.0)
