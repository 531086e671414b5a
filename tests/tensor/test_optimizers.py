"""Every dense optimizer of torch.optim trains DTensors to the parameters of training on one device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardwright as sw
from shardwright import comm
from shardwright.testing import run_ranks

R, S0, S1 = sw.Replicate(), sw.Shard(0), sw.Shard(1)
# Uneven shards and empty ones (3 over 4) are among them.
SHAPES: dict[str, tuple[tuple[int, ...], list[Any]]] = {
    "both": ((5, 6), [S0, S1]),
    "twice": ((7, 4), [S0, S0]),
    "rows": ((4, 3), [S0, R]),
    "whole": ((3, 5), [R, R]),
    "vector": ((3,), [S0, S0]),
    "scalar": ((), [R, R]),
}
STEPS = 3

Make = Callable[[list[Tensor]], torch.optim.Optimizer]


def _with(kind: str, **options: Any) -> Make:
    return lambda parameters: getattr(torch.optim, kind)(parameters, **options)


def _variants(kind: str, *options: dict[str, Any], foreach: bool = True, fused: bool = False) -> dict[str, Make]:
    ways: list[dict[str, Any]] = [{"foreach": False}, {"foreach": True}] if foreach else [{}]
    ways += [{"fused": True}] if fused else []
    return {
        f"{kind}({ {**option, **way} })": _with(kind, **option, **way) for option in (options or ({},)) for way in ways
    }


OPTIMIZERS: dict[str, Make] = {
    **_variants("Adadelta", {}, {"weight_decay": 0.1, "maximize": True}),
    **_variants("Adafactor", {}, {"weight_decay": 0.1}),
    **_variants("Adagrad", {}, {"lr_decay": 0.1, "weight_decay": 0.1, "maximize": True}, fused=True),
    **_variants("Adam", {}, {"amsgrad": True, "weight_decay": 0.1}, {"maximize": True}, fused=True),
    **_variants("AdamW", {}, {"amsgrad": True, "maximize": True}, fused=True),
    **_variants("Adamax", {"weight_decay": 0.1}),
    **_variants("ASGD", {"weight_decay": 0.1, "t0": 2}),
    **_variants("NAdam", {"weight_decay": 0.1}, {"decoupled_weight_decay": True, "weight_decay": 0.1}),
    **_variants("RAdam", {"weight_decay": 0.1, "betas": (0.5, 0.6)}),
    **_variants("RMSprop", {}, {"centered": True, "momentum": 0.9, "weight_decay": 0.1}),
    **_variants("Rprop", {"lr": 0.1}, {"lr": 0.1, "maximize": True}),
    **_variants("SGD", {"lr": 0.1}, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1}, fused=True),
    **_variants("SGD", {"lr": 0.1, "momentum": 0.9, "dampening": 0.5, "maximize": True}, fused=True),
}


def _initial() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    return {name: torch.randn(shape, dtype=torch.float64, generator=generator) for name, (shape, _) in SHAPES.items()}


def _loss(parameters: dict[str, Any], step: int) -> Any:
    total = 0.0
    for place, parameter in enumerate(parameters.values()):
        total = total + ((parameter - 0.1 * place) * (1 + step)).square().sum() + (parameter**3).sum() * 0.1
    return total


def _train(parameters: dict[str, Any], make: Make, steps: int = STEPS) -> dict[str, Any]:
    optimizer = make(list(parameters.values()))
    for step in range(steps):
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        _loss(parameters, step).backward()
        optimizer.step()
    return parameters


def _plain() -> dict[str, Any]:
    return {name: nn.Parameter(value) for name, value in _initial().items()}


def _distributed(mesh: Any) -> dict[str, Any]:
    return {
        name: nn.Parameter(sw.distribute_tensor(value, mesh, SHAPES[name][1])) for name, value in _initial().items()
    }


def _compare(ours: dict[str, Any], reference: dict[str, Any], tolerance: float = 1e-12) -> None:
    for name, parameter in ours.items():
        assert isinstance(parameter, sw.DTensor)
        assert list(parameter.placements) == SHAPES[name][1]
        torch.testing.assert_close(parameter.full_tensor(), reference[name], rtol=tolerance, atol=tolerance)


def _mesh() -> Any:
    return sw.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))


def test_dense_optimizers_train_to_the_parameters_of_one_device() -> None:
    def on_rank() -> dict[str, str]:
        mesh, failed = _mesh(), {}
        for name, make in OPTIMIZERS.items():
            try:
                _compare(_train(_distributed(mesh), make), _train(_plain(), make))
            except (RuntimeError, AssertionError, TypeError, IndexError) as error:
                failed[name] = f"{type(error).__name__}: {str(error)[:300]}"
        return failed

    for failed in run_ranks(4, on_rank):
        assert failed == {}


def test_muon_and_lbfgs_train_to_the_parameters_of_one_device() -> None:
    def on_rank() -> None:
        mesh = _mesh()
        matrices = ("both", "twice", "rows", "whole")

        def muon(parameters: dict[str, Any]) -> dict[str, Any]:
            return _train({name: parameters[name] for name in matrices}, _with("Muon", weight_decay=0.1))

        # Muon computes its directions in bfloat16, whose rounding depends on how products are cut.
        _compare(muon(_distributed(mesh)), muon(_plain()), tolerance=1e-3)

        def lbfgs(parameters: dict[str, Any], **options: Any) -> dict[str, Any]:
            optimizer = torch.optim.LBFGS(list(parameters.values()), lr=0.05, max_iter=4, **options)

            def closure() -> Any:
                optimizer.zero_grad()
                loss = _loss(parameters, 0)
                loss.backward()
                return loss

            for _ in range(2):
                optimizer.step(closure)
            return parameters

        _compare(lbfgs(_distributed(mesh)), lbfgs(_plain()), 1e-9)
        searched = {"line_search_fn": "strong_wolfe"}
        _compare(lbfgs(_distributed(mesh), **searched), lbfgs(_plain(), **searched), 1e-9)

    run_ranks(4, on_rank)


def test_sparse_adam_raises_with_the_reason() -> None:
    weight = nn.Parameter(sw.ones(3, mesh=sw.Mesh((1,))))
    weight.sum().backward()
    with pytest.raises(RuntimeError, match="does not support dense gradients, please consider Adam instead"):
        torch.optim.SparseAdam([weight]).step()


def test_gradients_are_clipped_by_their_global_norm_with_few_all_reduces() -> None:
    def on_rank() -> None:
        mesh = _mesh()
        for order in (2.0, 1.0, 3.0, float("inf"), 0.5):
            for foreach in (None, True, False):
                ours, plain = _distributed(mesh), _plain()
                for parameters in (ours, plain):
                    _loss(parameters, 0).backward()
                with comm.count() as traffic:
                    norm = nn.utils.clip_grad_norm_(ours.values(), 0.7, order, foreach=foreach)
                expected = nn.utils.clip_grad_norm_(plain.values(), 0.7, order)
                torch.testing.assert_close(norm.full_tensor(), expected, rtol=1e-12, atol=0)
                for name, parameter in ours.items():
                    torch.testing.assert_close(parameter.grad.full_tensor(), plain[name].grad, rtol=1e-12, atol=0)
                if foreach is not False:  # one for what is cut over both mesh dimensions, one for dp alone
                    assert traffic.calls.total() == 2, traffic.calls
                total = nn.utils.get_total_norm([p.grad for p in ours.values()], order, foreach=foreach)
                again = nn.utils.get_total_norm([p.grad for p in plain.values()], order)
                torch.testing.assert_close(total.full_tensor(), again, rtol=1e-12, atol=0)

    run_ranks(4, on_rank)


def test_gradients_are_clipped_by_value_and_in_half_precision_without_overflow() -> None:
    def on_rank() -> None:
        mesh = _mesh()
        ours, plain = _distributed(mesh), _plain()
        for parameters in (ours, plain):
            _loss(parameters, 0).backward()
            nn.utils.clip_grad_value_(parameters.values(), 0.5)
        for name, parameter in ours.items():
            torch.testing.assert_close(parameter.grad.full_tensor(), plain[name].grad)
        large = nn.Parameter(sw.full((64, 64), 200.0, mesh=mesh, placements=[S0, S1], dtype=torch.float16))
        large.grad = large.detach().clone()
        norm = nn.utils.clip_grad_norm_([large], 1.0)
        assert norm.item() == torch.tensor(200.0 * 64, dtype=torch.float16).item()

    run_ranks(4, on_rank)


def test_parameters_on_several_meshes_are_clipped_and_trained_together() -> None:
    def on_rank() -> None:
        line, grid = sw.init_device_mesh("cpu", (4,), mesh_dim_names=("all",)), _mesh()
        values = _initial()
        for foreach in (True, False):
            ours = {
                "both": nn.Parameter(sw.distribute_tensor(values["both"], grid, [S0, S1])),
                "rows": nn.Parameter(sw.distribute_tensor(values["rows"], line, [S0])),
            }
            plain = {"both": nn.Parameter(values["both"]), "rows": nn.Parameter(values["rows"])}
            if foreach:  # in a list, also a plain one, the same on every rank
                ours["here"], plain["here"] = nn.Parameter(values["whole"].clone()), nn.Parameter(values["whole"])
            for parameters in (ours, plain):
                optimizer = torch.optim.AdamW(parameters.values(), foreach=foreach)
                for _ in range(2):
                    optimizer.zero_grad()
                    for parameter in parameters.values():
                        parameter.square().sum().backward()
                    nn.utils.clip_grad_norm_(parameters.values(), 0.5, foreach=foreach)
                    optimizer.step()
            for name, parameter in ours.items():
                whole = parameter.full_tensor() if isinstance(parameter, sw.DTensor) else parameter
                torch.testing.assert_close(whole, plain[name], rtol=1e-12, atol=1e-12)

    run_ranks(4, on_rank)


def test_optimizer_states_are_saved_and_loaded_and_schedules_followed() -> None:
    def on_rank() -> None:
        mesh = _mesh()
        make = _with("AdamW", amsgrad=True, lr=0.1)

        def halfway(parameters: dict[str, Any]) -> dict[str, Any]:
            first = make(list(parameters.values()))
            schedule = torch.optim.lr_scheduler.CosineAnnealingLR(first, T_max=4)
            for step in range(2):
                first.zero_grad()
                _loss(parameters, step).backward()
                first.step()
                schedule.step()
            second = make(list(parameters.values()))
            second.load_state_dict(first.state_dict())
            resumed = torch.optim.lr_scheduler.CosineAnnealingLR(second, T_max=4)
            resumed.load_state_dict(schedule.state_dict())
            for step in range(2, 4):
                second.zero_grad(set_to_none=False)
                _loss(parameters, step).backward()
                second.step()
                resumed.step()
            return parameters

        _compare(halfway(_distributed(mesh)), halfway(_plain()))

    run_ranks(4, on_rank)


def test_infinite_gradient_on_one_rank_skips_the_step_on_all_ranks() -> None:
    """The gradient scaler's found_inf is reduced over the mesh."""

    def on_rank() -> None:
        mesh = _mesh()
        for fused in (False, True):
            weight = nn.Parameter(sw.distribute_tensor(torch.arange(8.0).reshape(4, 2), mesh, [S0, S1]))
            optimizer = torch.optim.SGD([weight], lr=0.1, fused=fused)
            scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=100)
            scaler.scale((weight * 2).sum()).backward()
            with torch.no_grad():
                local = weight.grad.to_local()
                if comm.rank() == 2:
                    local[0, 0] = float("inf")
            if not fused:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            assert scaler.get_scale() == 2.0
            assert torch.equal(weight.full_tensor(), torch.arange(8.0).reshape(4, 2))
            optimizer.zero_grad()
            scaler.scale((weight * 2).sum()).backward()
            scaler.step(optimizer)
            scaler.update()
            assert scaler.get_scale() == 2.0
            torch.testing.assert_close(weight.full_tensor(), torch.arange(8.0).reshape(4, 2) - 0.2)

    run_ranks(4, on_rank)


def test_foreach_on_different_layouts_uses_the_ordinary_operators() -> None:
    def on_rank() -> None:
        mesh = _mesh()
        values = [torch.randn(5, 4, generator=torch.Generator().manual_seed(seed)) for seed in range(4)]

        def spread(*places: Any) -> list[Any]:
            return [sw.distribute_tensor(value, mesh, place) for value, place in zip(values[:2], places, strict=True)]

        ours, other = spread([S0, S1], [R, S0]), spread([S1, R], [R, S0])
        third = spread([R, R], [S0, S1])
        plain = values[:2]
        scalar = torch.tensor(2.0)
        for name, args, reference in [
            ("add", (ours, other), (plain, plain)),
            ("mul", (ours, scalar), (plain, scalar)),
            ("mul", (ours, sw.full((), 2.0, mesh=mesh)), (plain, scalar)),
            ("div", (ours, [2.0, 3.0]), (plain, [2.0, 3.0])),
            ("maximum", (ours, third), (plain, plain)),
            ("lerp", (ours, other, 0.3), (plain, plain, 0.3)),
            ("addcmul", (ours, other, third, [1.0, 2.0]), (plain, plain, plain, [1.0, 2.0])),
            (
                "addcdiv",
                (ours, other, third, torch.tensor([1.0, 2.0])),
                (plain, plain, plain, torch.tensor([1.0, 2.0])),
            ),
            ("pow", (2.0, ours), (2.0, plain)),
            ("norm", (ours,), (plain,)),
            ("max", (ours,), (plain,)),
            ("mm", (ours, [t.T for t in other]), (plain, [t.T for t in plain])),
            ("neg", (ours,), (plain,)),
        ]:
            if not hasattr(torch, f"_foreach_{name}"):
                continue  # newer than this torch
            got = getattr(torch, f"_foreach_{name}")(*args)
            want = getattr(torch, f"_foreach_{name}")(*reference)
            for one, expected in zip(got, want, strict=True):
                torch.testing.assert_close(one.full_tensor(), expected, msg=name)
        targets = [t.clone() for t in ours]
        torch._foreach_maximum_(targets, third)
        torch._foreach_add_(targets, other, alpha=0.5)
        torch._foreach_copy_(ours, targets)
        for got, value, layout in zip(ours, plain, spread([S0, S1], [R, S0]), strict=True):
            torch.testing.assert_close(got.full_tensor(), value * 1.5)
            assert got.sharding is layout.sharding
        addends = [sw.DTensor.from_local(torch.full((4,), 1.0), mesh, [sw.Partial(), R])]
        torch.testing.assert_close(torch._foreach_sqrt(addends)[0].full_tensor(), torch.full((4,), 2.0).sqrt())
        assert torch._foreach_norm(addends)[0].item() == 4.0

    run_ranks(4, on_rank)
