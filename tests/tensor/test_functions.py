"""Custom autograd Functions run on DTensors in forward and backward, and give the gradients of plain torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import Function

import shardwright as sw
from shardwright.errors import MixedTensorsError, TensorError
from shardwright.testing import run_ranks

R, S0, S1, P = sw.Replicate(), sw.Shard(0), sw.Shard(1), sw.Partial()


class AddBias(Function):
    @staticmethod
    def forward(ctx: Any, x: Any, bias: Any) -> Any:
        return x + bias

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        return gradient, gradient.sum(0)


class Broadcast(AddBias):
    """Leaves it to torch to sum the gradient of a broadcast argument."""

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        return gradient, gradient


class Linear(Function):
    @staticmethod
    def forward(ctx: Any, x: Any, w: Any) -> Any:
        ctx.save_for_backward(x, w)
        return x @ w

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        x, w = ctx.saved_tensors
        return gradient @ w.t() if ctx.needs_input_grad[0] else None, x.t() @ gradient


class Separate(Function):
    """With setup_context, a default argument, a saved output and vjp."""

    @staticmethod
    def forward(x: Any, w: Any, factor: float = 0.5) -> Any:
        return (x @ w).tanh() * factor

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        x, w, ctx.factor = inputs
        ctx.save_for_backward(x, w, output)

    @staticmethod
    def vjp(ctx: Any, gradient: Any) -> Any:
        x, w, output = ctx.saved_tensors
        assert output.shape == gradient.shape
        inner = gradient * ctx.factor * (1 - (output / ctx.factor) ** 2)
        return inner @ w.t(), x.t() @ inner, None


def fused(x: Any, w: Any) -> Any:
    """A loss that computes its gradient in forward, and keeps it as an attribute, as fused kernels do."""

    class Fused(Function):
        @staticmethod
        def forward(ctx: Any, x: Any, w: Any) -> Any:
            logits = x @ w
            chances = logits.softmax(-1)
            target = torch.zeros_like(chances)
            target[:, 0] = 1
            ctx.delta, ctx.x, ctx.w = (chances - target) / len(chances), x, w
            return -chances[:, 0].log().mean()

        @staticmethod
        @torch.autograd.function.once_differentiable
        def backward(ctx: Any, gradient: Any) -> Any:
            return ctx.delta @ ctx.w.t() * gradient, ctx.x.t() @ ctx.delta * gradient

    loss = Fused.apply(x * 3, w) * 2
    assert type(Fused.apply(x, w).grad_fn).__name__ == "FusedBackward"
    again = Fused.apply(x, w) ** 2
    (slope,) = torch.autograd.grad(again, x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        slope.sum().backward()
    return loss + (slope.detach() ** 2).sum()


class Outer(Function):
    """A nested Function with two results, one of them without gradient."""

    @staticmethod
    def forward(ctx: Any, x: Any, w: Any) -> Any:
        product = Linear.apply(x, w)
        largest = product.argmax(-1)
        ctx.save_for_backward(x, w, product)
        ctx.mark_non_differentiable(largest)
        return product * product, product.sum(0), largest

    @staticmethod
    def backward(ctx: Any, squares: Any, sums: Any, largest: Any) -> Any:
        x, w, product = ctx.saved_tensors
        inner = 2 * product * squares + sums
        return inner @ w.t(), x.t() @ inner


def of_outer(x: Any, w: Any) -> Any:
    squares, sums, _ = Outer.apply(x, w)
    return squares.sum() + (sums**2).sum()


class Unused(Function):
    """Gets None for an unused result."""

    @staticmethod
    def forward(ctx: Any, x: Any, w: Any) -> Any:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(w)
        return x @ w, x * 2, "text"

    @staticmethod
    def backward(ctx: Any, products: Any, doubles: Any, text: Any) -> Any:
        assert products is None
        assert text is None
        (w,) = ctx.saved_tensors
        return doubles * 2, torch.zeros_like(w)


class Same(Function):
    """Returns an input unchanged."""

    @staticmethod
    def forward(ctx: Any, x: Any, w: Any) -> Any:
        return w, x

    @staticmethod
    def backward(ctx: Any, ws: Any, xs: Any) -> Any:
        return -xs, 3 * ws


class InPlace(Function):
    @staticmethod
    def forward(ctx: Any, x: Any, w: Any) -> Any:
        x.mul_(2)
        ctx.mark_dirty(x)
        ctx.save_for_backward(w)
        return x, x @ w

    @staticmethod
    def backward(ctx: Any, xs: Any, products: Any) -> Any:
        (w,) = ctx.saved_tensors
        return 2 * xs + 2 * products @ w.t(), torch.zeros_like(w)


class Columns(Function):
    """Indexes a sharded dimension: returns a copy that looks like a view."""

    @staticmethod
    def forward(ctx: Any, x: Any, w: Any) -> Any:
        ctx.shape = x.shape
        ctx.save_for_backward(w)
        return x[1] @ w

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        (w,) = ctx.saved_tensors
        row = gradient @ w.t()
        return torch.stack([row if place == 1 else row * 0 for place in range(ctx.shape[0])]), torch.zeros_like(w)


linear = Linear.apply  # a name of its own, as many programs have it
PROGRAMS: dict[str, Callable[[Any, Any], Any]] = {
    "a bias": lambda x, w: (AddBias.apply(x @ w, w[0]) ** 2).sum(),
    "a gradient that is broadcast": lambda x, w: (Broadcast.apply(x @ w, w[0]) ** 2).sum(),
    "a product": lambda x, w: linear(x, w).tanh().sum(),
    "a product of a batch": lambda x, w: linear(x.detach(), w).tanh().sum(),
    "the newer form": lambda x, w: (Separate.apply(x, w) ** 2).sum(),
    "the newer form by name": lambda x, w: (Separate.apply(x, w=w, factor=0.25) ** 2).sum(),
    "a fused loss": fused,
    "two results, nested": of_outer,
    "a result without use": lambda x, w: (Unused.apply(x, w)[1] ** 2).sum(),
    "inputs returned": lambda x, w: (Same.apply(x, w)[1] @ Same.apply(x * 2, w * 2)[0] ** 2).sum(),
    "in place": lambda x, w: sum((value**2).sum() for value in InPlace.apply(x * 1, w)),
    "a row": lambda x, w: (Columns.apply(x, w) ** 2).sum(),
}
TWICE = {"a bias", "a product", "the newer form", "two results, nested"}  # with a second derivative as well


def values() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return (torch.randn(5, 4, dtype=torch.float64, generator=generator), torch.randn(4, 4, dtype=torch.float64))


def close(ours: Any, theirs: Tensor) -> None:
    assert isinstance(ours, sw.DTensor)
    torch.testing.assert_close(ours.full_tensor(), theirs, rtol=1e-10, atol=1e-12)


def same_gradients() -> None:
    mesh = sw.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    whole_x, whole_w = values()
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda saved: saved.clone(), lambda saved: saved)
    for placements in ([S0, R], [S1, S0]), ([R, S1], [R, R]), ([S0, S1], [S0, S0]):
        for name, program in PROGRAMS.items():
            for hooked in (False, True):
                plain = [value.clone().requires_grad_() for value in (whole_x, whole_w)]
                ours = [
                    sw.distribute_tensor(value.detach(), mesh, placement).requires_grad_()
                    for value, placement in zip(plain, placements, strict=True)
                ]
                results = []
                for arguments in (plain, ours):
                    if hooked:
                        with hooks:
                            loss = program(*arguments)
                    else:
                        loss = program(*arguments)
                    if name in TWICE:
                        first = torch.autograd.grad(loss, arguments, create_graph=True)
                        loss = loss + sum((gradient**2).sum() for gradient in first)
                    loss.backward()
                    results.append(loss.detach())
                close(results[1], results[0])
                for mine, theirs in zip(ours, plain, strict=True):
                    if theirs.grad is None:
                        assert mine.grad is None, name
                        continue
                    close(mine.grad, theirs.grad)


def test_functions_give_the_gradients_of_plain_torch() -> None:
    run_ranks(4, same_gradients)


class Rows(Function):
    """Takes plain arguments, and uses a DTensor of its own."""

    @staticmethod
    def forward(ctx: Any, x: Any, hold: list[Any]) -> Any:
        ctx.hold = hold
        result = hold[0] * 2
        ctx.save_for_backward(result)
        return result

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        (result,) = ctx.saved_tensors
        assert result.shape == gradient.shape == ctx.hold[0].shape
        return (gradient * result).sum(0), None


def plain_tensors_beside() -> None:
    mesh = sw.init_device_mesh("cpu", (2,))
    whole_x, whole_w = values()
    x = sw.distribute_tensor(whole_x, mesh, [S0]).requires_grad_()
    theirs, reference = whole_x.clone().requires_grad_(), whole_w.clone().requires_grad_()
    Linear.apply(theirs, reference).sin().sum().backward()
    weight = whole_w.clone().requires_grad_()
    with pytest.raises(MixedTensorsError, match="implicit_replication"):
        Linear.apply(x, weight)
    with sw.implicit_replication():
        Linear.apply(x, weight).sin().sum().backward()
    close(x.grad, theirs.grad)
    assert type(weight.grad) is Tensor
    torch.testing.assert_close(weight.grad, reference.grad)

    hook = torch.autograd.graph.saved_tensors_hooks(lambda saved: saved.clone(), lambda saved: saved)
    for held in (x.detach(), whole_x):
        weight.grad = None
        with hook:
            result = Rows.apply(weight[0], [held])
        (result**2).sum().backward()
        torch.testing.assert_close(weight.grad[0], 8 * (whole_x**2).sum(0))


def test_plain_argument_gets_a_replicated_plain_gradient() -> None:
    run_ranks(2, plain_tensors_beside)


class Local(Function):
    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        return x * 1

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        return gradient.to_local()


class Short(Local):
    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        return gradient[:1, :2]


class Many(Local):
    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        return gradient, gradient


def wrong_gradients() -> None:
    mesh = sw.init_device_mesh("cpu", (2,))
    x = sw.distribute_tensor(values()[0], mesh, [S0]).requires_grad_()
    with pytest.raises(MixedTensorsError, match=r"Local.backward returned a plain tensor .*argument 0.*local_map"):
        Local.apply(x).sum().backward()
    with pytest.raises(TensorError, match=r"Short.backward returned a gradient \[1, 2\].*the shapes do not match"):
        Short.apply(x).sum().backward()
    with pytest.raises(RuntimeError, match="incorrect number of gradients"):
        Many.apply(x).sum().backward()
    mapped = sw.local_map(Local.apply, out_placements=[S0], in_placements=([S0],))
    with pytest.raises(AttributeError, match="to_local"):  # there, gradients are plain
        mapped(x).sum().backward()


def test_plain_gradient_or_wrong_shape_raises_on_every_rank() -> None:
    run_ranks(2, wrong_gradients)


class Identity(Function):
    """Records what its backward gets."""

    @staticmethod
    def forward(ctx: Any, x: Any, seen: list[Any]) -> Any:
        ctx.seen = seen
        return x

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        ctx.seen.append(gradient)
        return gradient * 2, None


def sums_of_addends() -> None:
    """The gradient of a partial result is replicated; scaling for an average happens inside the engine."""
    mesh = sw.init_device_mesh("cpu", (2,))
    whole = values()[0]
    for op, share in (("sum", 1.0), ("avg", 0.5)):
        local = (whole / (2 * share)).requires_grad_()
        addends = sw.DTensor.from_local(local, mesh, [sw.Partial(op)])
        seen: list[Any] = []
        shown = Identity.apply(addends, seen)
        assert shown.placements == (sw.Partial(op),)
        shown.register_hook(seen.append)
        shown.sin().sum().backward()
        for gradient in seen:
            assert gradient.placements == (R,)
            close(gradient, whole.cos())
        torch.testing.assert_close(local.grad, 2 * share * whole.cos())
        theirs = whole.clone().requires_grad_()
        slopes = []
        for x in (theirs, sw.DTensor.from_local(local.detach(), mesh, [sw.Partial(op)]).requires_grad_()):
            (slope,) = torch.autograd.grad((Identity.apply(x, []) ** 3).sum(), x, create_graph=True)
            slopes += torch.autograd.grad((slope**2).sum(), x)
        close(slopes[1], slopes[0])


def test_gradients_of_partial_tensors_are_replicated_in_backward() -> None:
    run_ranks(2, sums_of_addends)


def test_functions_on_plain_tensors_are_unchanged() -> None:
    before = Linear._backward_cls
    x, w = (value.requires_grad_() for value in values())
    result = Linear.apply(x, w)
    assert type(result.grad_fn) is before
    result.sum().backward()
    assert type(x.grad) is Tensor
    with pytest.raises(TypeError, match="positional argument"):
        Linear.apply(x)


def test_custom_operator_with_registered_autograd_saves_local_tensors() -> None:
    """torch runs registered autograd as a Function, below interception."""

    @torch.library.custom_op("functions::cube", mutates_args=())
    def cube(x: Tensor) -> Tensor:
        return x**3

    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        assert type(x) is type(gradient) is Tensor
        return 3 * x**2 * gradient

    cube.register_autograd(backward, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs))
    with sw.register_rule(cube, sw.rules.pointwise()):
        mesh = sw.init_device_mesh("cpu", (1,))
        x = sw.distribute_tensor(values()[0], mesh, [S0]).requires_grad_()
        cube(x).sum().backward()
        close(x.grad, 3 * values()[0] ** 2)
