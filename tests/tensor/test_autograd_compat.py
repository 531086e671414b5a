"""Autograd works as in torch: hooks, grad, checkpointing, modes, autocast, custom Functions."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import shardwright as sw
from shardwright import comm
from shardwright.errors import MixedTensorsError, TensorError, UnsupportedError
from shardwright.testing import on_ranks, run_ranks
from tests.tensor.values import close, spread

R, S0, S1, P = sw.Replicate(), sw.Shard(0), sw.Shard(1), sw.Partial()


def _mesh() -> Any:
    return sw.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))


def _value(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def _pair(mesh: Any, placements: list[Any], *shape: int, seed: int = 0) -> tuple[Any, Tensor]:
    value = _value(*shape, seed=seed)
    return sw.distribute_tensor(value, mesh, placements).requires_grad_(), value.clone().requires_grad_()


def _same(ours: Any, reference: Tensor) -> None:
    assert isinstance(ours, sw.DTensor)
    torch.testing.assert_close(ours.full_tensor(), reference, rtol=1e-12, atol=1e-12)


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any, factor: float) -> Any:
        square = x * x
        cube = square * x
        ctx.save_for_backward(x, square, cube)
        ctx.factor = factor
        return cube * factor, square

    @staticmethod
    def backward(ctx: Any, cubes: Any, squares: Any) -> Any:
        x, square, cube = ctx.saved_tensors
        assert ctx.needs_input_grad == (True, False)
        assert all(isinstance(value, type(x)) and value.shape == x.shape for value in (square, cube, cubes, squares))
        return 3 * square * ctx.factor * cubes + 2 * x * squares + 0 * cube.sum(), None


class Sine(torch.autograd.Function):
    @staticmethod
    def forward(x: Any) -> Any:
        return x.sin()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(inputs[0], output)

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        x, output = ctx.saved_tensors
        assert output.shape == x.shape
        return x.cos() * gradient


def test_hook_on_an_output_that_backward_does_not_reach_gets_none() -> None:
    def on_rank() -> None:
        ours, plain = _pair(_mesh(), [R, R], 4, 3)
        seen: list[Any] = []
        for x in (ours, plain):
            rows = x.unbind(0)
            rows[1].register_hook(seen.append)
            rows[2].sum().backward()
        assert seen in ([], [None, None])  # whether torch calls it or not, both are treated alike
        _same(ours.grad, plain.grad)

    run_ranks(4, on_rank)


def test_hooks_see_gradients_as_dtensors_and_may_replace_them() -> None:
    """Tensor hooks, hooks after accumulation, and hooks of modules."""

    def on_rank() -> None:
        mesh = _mesh()
        ours, plain = _pair(mesh, [S0, R], 5, 4)
        seen: list[Any] = []

        def double(gradient: Any) -> Any:
            seen.append(gradient)
            return gradient * 2

        for x in (ours, plain):
            y = x * 3
            y.register_hook(double)
            x.register_post_accumulate_grad_hook(lambda leaf: seen.append((type(leaf), leaf.grad)))
            y.retain_grad()
            (y**2).sum().backward()
            if x is ours:
                _same(y.grad, 2 * 2 * 3 * plain.detach())
        assert isinstance(seen[0], sw.DTensor)
        assert seen[0].placements == (S0, R)
        assert seen[1][0] is sw.DTensor
        _same(seen[1][1], seen[3][1])
        _same(ours.grad, plain.grad)
        z = ours * 2
        z.register_hook(lambda gradient: gradient.to_local())
        with pytest.raises(MixedTensorsError, match="returned a plain tensor"):
            z.sum().backward()

        layer = nn.Linear(4, 3).double()
        spread = sw.distribute_module(nn.Linear(4, 3).double(), mesh)
        with sw.implicit_replication():
            spread.load_state_dict(layer.state_dict())
        calls: list[tuple[str, tuple[int, ...]]] = []
        for module in (layer, spread):
            module.register_forward_pre_hook(lambda _, inputs: calls.append(("before", tuple(inputs[0].shape))))
            module.register_forward_hook(lambda _, inputs, out: calls.append(("after", tuple(out.shape))))
            module.register_full_backward_hook(lambda _, given, taken: calls.append(("backward", ())))
        layer(plain).sum().backward()
        spread(ours).sum().backward()
        assert calls[:3] == calls[3:]
        _same(spread.weight.grad, layer.weight.grad)

    run_ranks(4, on_rank)


def test_autograd_grad_supports_its_arguments_and_second_derivatives() -> None:
    def on_rank() -> None:
        mesh = _mesh()
        pairs = [_pair(mesh, [S0, S1], 5, 4), _pair(mesh, [R, S0], 4, 3, seed=1), _pair(mesh, [R, R], 2, seed=2)]
        ours, plain = [list(side) for side in zip(*pairs, strict=True)]
        seed = _value(5, 3, seed=4)
        for a, b, unused, g in (
            (*ours, sw.distribute_tensor(seed, mesh, [R, S1])),
            (*plain, seed),
        ):
            y = torch.tanh(a @ b)
            first = torch.autograd.grad(y, [a, b, unused], g, create_graph=True, allow_unused=True)
            assert first[2] is None
            total = sum((value**2).sum() for value in first[:2])
            second = torch.autograd.grad(total, (a, b), retain_graph=True)
            (again,) = torch.autograd.grad(total, a, retain_graph=True)
            made = torch.autograd.grad(y.sum(), (a, unused), materialize_grads=True)
            if a is ours[0]:
                kept = (*first[:2], *second, again, *made)
            else:
                for value, reference in zip(kept, (*first[:2], *second, again, *made), strict=True):
                    _same(value, reference)
        with pytest.raises(RuntimeError, match="not have been used"):
            torch.autograd.grad((ours[0] ** 2).sum(), ours[2])
        with pytest.raises(TensorError, match="only for one element"):
            (ours[0] * 2).backward()
        with pytest.raises(MixedTensorsError, match="plain tensor"):
            (ours[0] * 2).backward(torch.ones(5, 4, dtype=torch.float64))

    run_ranks(4, on_rank)


def test_backward_accumulates_into_the_given_inputs_only() -> None:
    def on_rank() -> None:
        mesh = _mesh()
        ours = [_pair(mesh, [S0, R], 4, 4, seed=s) for s in range(2)]
        for side in (0, 1):
            a, b = ours[0][side], ours[1][side]
            loss = (a @ b).square().sum()
            loss.backward(inputs=[a], retain_graph=True)
            assert b.grad is None
            kept = a.grad
            loss.backward()
            assert a.grad is kept  # accumulated in place: its identity matters
            with torch.no_grad():
                assert not (a * 2).requires_grad
            with torch.inference_mode():
                assert (a * 2).is_inference()
            with torch.no_grad(), torch.set_grad_enabled(True):
                assert (a * 2).requires_grad
            assert not a.detach().requires_grad
        for mine, reference in ours:
            _same(mine.grad, reference.grad)

    run_ranks(4, on_rank)


@pytest.mark.parametrize("reentrant", [True, False])
def test_activation_checkpointing_gives_the_gradients_of_plain_training(reentrant: bool) -> None:
    """The recomputed forward is intercepted too, and draws the same random numbers."""

    def on_rank() -> None:
        mesh = _mesh()
        x, w = _pair(mesh, [S0, R], 6, 4), _pair(mesh, [R, S1], 4, 5, seed=1)

        def block(x: Any, w: Any) -> Any:
            return torch.tanh(x @ w).softmax(-1)

        for side in (0, 1):
            y = checkpoint(block, x[side], w[side], use_reentrant=reentrant)
            (y**2).sum().backward()
        _same(x[0].grad, x[1].grad)
        _same(w[0].grad, w[1].grad)

        def noisy(x: Any, w: Any) -> Any:
            return nn.functional.dropout((x @ w), 0.5)

        x[0].grad = w[0].grad = None
        y = checkpoint(noisy, x[0], w[0], use_reentrant=reentrant)
        y.sum().backward()
        dropped = (y.detach() != 0).double() * 2  # the mask of the forward pass
        _same(x[0].grad, (dropped @ w[0].detach().T).full_tensor())

    run_ranks(4, on_rank)


def test_saved_tensor_hooks_pack_and_unpack_local_tensors() -> None:
    def on_rank() -> None:
        mesh = _mesh()
        x, reference = _pair(mesh, [S0, S1], 5, 4)
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t.numpy(force=True), torch.from_numpy):
            y = (x.detach() * 1).requires_grad_()
            (y**3).sum().backward()
        _same(y.grad, 3 * reference.detach() ** 2)
        with torch.autograd.graph.save_on_cpu():
            (x.exp() * 2).sum().backward()
        _same(x.grad, 2 * reference.detach().exp())

    run_ranks(4, on_rank)


def test_autocast_computes_in_bfloat16_with_float32_gradients() -> None:
    def on_rank() -> None:
        mesh = _mesh()
        value, weight = torch.randn(6, 4, generator=torch.Generator().manual_seed(0)), torch.eye(4)
        x = sw.distribute_tensor(value, mesh, [S0, R])
        w = sw.distribute_tensor(weight, mesh, [R, S1]).requires_grad_()
        plain = weight.clone().requires_grad_()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y, reference = x @ w, value @ plain
            assert y.dtype == reference.dtype == torch.bfloat16
            assert (y.float() + 1).dtype == torch.float32
        y.float().sum().backward()
        reference.float().sum().backward()
        assert w.grad.dtype == torch.float32
        torch.testing.assert_close(w.grad.full_tensor(), plain.grad, rtol=2e-2, atol=2e-2)

    run_ranks(4, on_rank)


def test_custom_functions_get_dtensors_in_backward() -> None:
    """Gradients and saved tensors, outputs among them, come with their layouts."""

    def on_rank() -> None:
        mesh = _mesh()
        for placements in ([S0, S1], [R, S0], [R, R]):
            ours, plain = _pair(mesh, placements, 5, 4)
            for x, cube in ((ours, Cube.apply), (plain, Cube.apply)):
                first, second = cube(x, 2.0)
                ((first * 0.5).sum() + (second @ second.T).sum()).backward()
            _same(ours.grad, plain.grad)
            ours.grad = plain.grad = None
            for x, sine in ((ours, Sine.apply), (plain, Sine.apply)):
                (slope,) = torch.autograd.grad(sine(x).sum(), x, create_graph=True)
                (slope**2).sum().backward()
            _same(ours.grad, plain.grad)

    run_ranks(4, on_rank)


def test_custom_functions_may_return_gradients_in_any_layout_but_not_plain() -> None:
    class Replicated(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            return x * 1

        @staticmethod
        def backward(ctx: Any, gradient: Any) -> Any:
            return gradient.redistribute(placements=[R, R])

    class Plain(Replicated):
        @staticmethod
        def backward(ctx: Any, gradient: Any) -> Any:
            return gradient.to_local()

    def on_rank() -> None:
        ours, plain = _pair(_mesh(), [S0, S1], 5, 4)
        (Replicated.apply(ours) ** 2).sum().backward()
        _same(ours.grad, 2 * plain.detach())
        with pytest.raises(MixedTensorsError, match=r"Plain\.backward returned a plain tensor"):
            Plain.apply(ours).sum().backward()

    run_ranks(4, on_rank)


def test_anomaly_mode_and_gradcheck_work() -> None:
    def on_rank() -> None:
        mesh = _mesh()
        ours, plain = _pair(mesh, [S0, S1], 4, 4)
        with torch.autograd.set_detect_anomaly(True, check_nan=True):
            for x in (ours, plain):
                (x.sigmoid() @ x).sum().backward()
            _same(ours.grad, plain.grad)
            root = (ours.detach() * 0).requires_grad_()
            with pytest.raises(RuntimeError, match="returned nan values"):
                (root.sqrt() * 0).sum().backward()

    def quietly() -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # anomaly mode says that it is slow
            on_rank()

    run_ranks(4, quietly)


def test_a_parameter_used_three_times_is_reduced_once() -> None:
    """All uses of a parameter in a step share one redistribution."""

    def on_rank() -> None:
        mesh = sw.init_device_mesh("cpu", (4,))
        w = nn.Parameter(sw.distribute_tensor(_value(4, 4), mesh, [R]))
        x = sw.distribute_tensor(_value(8, 4, seed=1), mesh, [S0])
        once, thrice = (x @ w).sum(), (((x @ w) @ w).tanh() @ w).sum()
        with comm.count() as single:
            once.backward()
        w.grad = None
        with comm.count() as traffic:
            thrice.backward()
        assert traffic.calls == single.calls
        assert traffic.bytes > 0
        plain = _value(4, 4).requires_grad_()
        (((_value(8, 4, seed=1) @ plain) @ plain).tanh() @ plain).sum().backward()
        _same(w.grad, plain.grad)

    run_ranks(4, on_rank)


def _symmetric(layer: nn.Module) -> nn.Module:
    class Symmetric(nn.Module):
        def forward(self, x: Any) -> Any:
            return x.triu() + x.triu(1).transpose(-1, -2)

    nn.utils.parametrize.register_parametrization(layer, "weight", Symmetric())
    return layer


def test_gradient_utilities_of_torch_give_the_values_of_plain_torch() -> None:
    """Derivatives of functions, parametrizations, gradients within hooks and hooks of several tensors."""

    def of_functions(x: Any, w: Any) -> list[Any]:
        functional = torch.autograd.functional
        loss, several = lambda x: (x @ w).tanh().sum(), lambda x: (x @ w).tanh()  # short
        found = [functional.jacobian(several, x), functional.hessian(loss, x)]
        for tool, function in (("vjp", several), ("hvp", loss), ("vhp", loss), ("jvp", several)):
            found += getattr(functional, tool)(function, x, x)
        return found

    def parametrized(x: Any, w: Any) -> list[Any]:
        found = []
        kinds = nn.utils.parametrizations
        for change in (kinds.weight_norm, _symmetric):
            layer = nn.Linear(4, 4, bias=False).double()
            layer.weight = nn.Parameter(w.clone())
            layer = change(layer)
            layer(x).tanh().sum().backward()
            found += [parameter.grad for parameter in layer.parameters()]
        return found

    def in_hooks(x: Any, w: Any) -> list[Any]:
        x, w, found = x.clone().requires_grad_(), w.clone().requires_grad_(), []
        y = (x @ w).tanh()

        def inner(gradient: Any) -> None:
            with torch.enable_grad():
                leaf = w.detach().requires_grad_()
                found.extend(torch.autograd.grad((leaf**3 / leaf.shape[0]).sum() * gradient.sum(), leaf))

        y.register_hook(inner)
        torch.autograd.graph.register_multi_grad_hook((x, w), found.extend)
        y.square().sum().backward()
        return found

    def on_rank() -> None:
        mesh = sw.init_device_mesh("cpu", (2,))
        x, w = _value(4, 4), _value(4, 4, seed=1)
        for tool in (of_functions, parametrized, in_hooks):
            theirs = tool(x, w)
            ours = tool(sw.distribute_tensor(x, mesh, [S0]), sw.distribute_tensor(w, mesh, [S0]))
            for mine, reference in zip(ours, theirs, strict=True):
                _same(mine, reference)

    run_ranks(2, on_rank)


def test_gradients_without_a_known_layout_raise() -> None:
    def on_rank() -> None:
        x = sw.distribute_tensor(_value(4), sw.init_device_mesh("cpu", (2,)), [S0]).requires_grad_()
        y = x.sin()
        edge = torch.autograd.graph.get_gradient_edge(y)
        with pytest.raises(UnsupportedError, match="GradientEdge"):
            torch.autograd.grad(y.sum(), [edge])
        with pytest.raises(UnsupportedError, match="GradientEdge"):
            torch.autograd.backward([y, edge], [y.detach(), y.detach()])
        with pytest.raises(MixedTensorsError, match="as the gradient of a plain tensor"):
            torch.autograd.backward([y, y.to_local()], [y.detach(), y.detach()])
        z = x * 2
        z.register_hook(lambda _: torch.autograd.grad(x.detach().requires_grad_() * 2, x, torch.ones(2)))
        with pytest.raises(MixedTensorsError, match="plain tensor of shape"):  # in a backward pass as well
            z.sum().backward()

    run_ranks(2, on_rank)


@on_ranks(3)
def test_gradients_of_gradients_of_a_write_to_empty_shards_match_torch_or_are_refused_on_all_ranks() -> None:
    """torch's gradient of a write to a view has no graph where the shard is empty."""
    values, added = torch.randn(8, 2, 4, generator=torch.Generator().manual_seed(1)), torch.arange(8.0)
    picked = torch.tensor([0, 0, 0, 0, 1, 0, 0, 0], dtype=torch.bool)  # all of it is on one rank
    for axis in (0, 1):
        x, mask, filled = values.movedim(0, axis), picked, torch.ones(1, 2, 4, dtype=torch.bool).movedim(0, axis)

        def program(x: Any, mask: Any, filled: Any, added: Any, axis: int = axis) -> Any:
            y = x[mask] if axis == 0 else x[:, mask]
            y[filled] += added
            (gradient,) = torch.autograd.grad((y * y).sum(), [added], create_graph=True)
            return torch.autograd.grad(gradient.square().sum(), [added])[0]

        expected = program(x, mask, filled, added.clone().requires_grad_())
        mesh = sw.init_device_mesh("cpu", (3,))
        x, mask, filled = (
            sw.distribute_tensor(tensor, mesh, [placement], src_data_rank=None)
            for tensor, placement in ((x, sw.Replicate()), (mask, sw.Shard(0)), (filled, sw.Shard(0)))
        )
        leaf = sw.distribute_tensor(added, mesh, [sw.Shard(0)], src_data_rank=None).requires_grad_()
        outcome = "right"
        try:
            torch.testing.assert_close(program(x, mask, filled, leaf).full_tensor(), expected)
        except UnsupportedError as error:
            assert "out-of-place" in str(error)  # noqa: PT017  both outcomes are right
            outcome = "refused"
        assert len(set(comm.gather_bytes(outcome.encode()))) == 1
        assert axis or outcome == "right"


@on_ranks(2)
def test_views_of_empty_shards_keep_the_graph_of_gradients_after_a_write_to_their_base() -> None:
    """torch replaces such a view by as_strided, whose gradient has no graph where there are no elements."""
    for view in (lambda x: x.view_as(x), lambda x: x.view(1, 2, 2), lambda x: x.t(), lambda x: x[:, 1:]):
        found = []
        for x in (torch.tensor([[2.0, 0.0, 1.0, -1.0]]), spread(torch.tensor([[2.0, 0.0, 1.0, -1.0]]), sw.Shard(0))):
            x.requires_grad_()
            viewed = view(x)
            x.detach().mul_(2)  # shares the version counter
            (first,) = torch.autograd.grad((viewed**3).sum(), [x], create_graph=True)
            assert first.requires_grad
            (second,) = torch.autograd.grad((first * first).sum(), [x])
            found.append(second)
        close(found[1], found[0])
