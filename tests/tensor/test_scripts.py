"""TorchScript, tracing and export never compute on a shard."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import shardwright as sw
from shardwright.errors import MixedTensorsError, UnsupportedError
from shardwright.testing import run_ranks

R, S0, P = sw.Replicate(), sw.Shard(0), sw.Partial()
WHOLE = torch.arange(32.0).reshape(8, 4)

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")


def centred(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return (x - x.mean()) * weight


def joined(parts: list[torch.Tensor]) -> tuple[torch.Tensor, int]:
    return torch.cat(parts), parts[0].size(0)


def doubled(x: torch.Tensor) -> torch.Tensor:
    return x.mul_(2)


def taken(parts: dict[str, torch.Tensor]) -> torch.Tensor:
    return parts["x"] + 1


def _quietly(work: Any) -> Any:
    def on_rank() -> None:
        import warnings

        warnings.simplefilter("ignore")  # torch.jit is deprecated
        work()

    return on_rank


def test_scripted_function_runs_on_replicated_tensors() -> None:
    def work() -> None:
        mesh = sw.init_device_mesh("cpu", (2,))
        script = torch.jit.script(centred)
        for x in (sw.distribute_tensor(WHOLE, mesh, [S0]), sw.DTensor.from_local(WHOLE / 2, mesh, [P])):
            weight = sw.distribute_tensor(torch.arange(4.0), mesh, [S0]).requires_grad_()
            plain = torch.arange(4.0).requires_grad_()
            found, expected = script(x, weight), centred(WHOLE, plain)
            assert isinstance(found, sw.DTensor)
            torch.testing.assert_close(found.full_tensor(), expected)
            found.square().sum().backward()
            expected.square().sum().backward()
            torch.testing.assert_close(weight.grad.full_tensor(), plain.grad)
            both, rows = torch.jit.script(joined)([x, x])
            assert rows == 8
            assert torch.equal(both.full_tensor(), torch.cat([WHOLE, WHOLE]))
            written = x.clone()
            torch.jit.script(doubled)(written)
            assert torch.equal(written.full_tensor(), WHOLE * 2)
            with pytest.raises(MixedTensorsError, match="centred"):
                script(x, torch.arange(4.0))
            with pytest.raises(UnsupportedError, match=r"taken.*x\.full_tensor\(\)"):
                torch.jit.script(taken)({"x": x})
            layer = nn.Linear(4, 3)
            torch.testing.assert_close(torch.jit.script(layer)(x).full_tensor(), layer(WHOLE))
        assert torch.equal(script(WHOLE, torch.ones(4)), centred(WHOLE, torch.ones(4)))

    run_ranks(2, _quietly(work))


def test_scripting_tracing_and_exporting_dtensors_raise() -> None:
    def work() -> None:
        mesh = sw.init_device_mesh("cpu", (2,))
        x = sw.distribute_tensor(WHOLE, mesh, [S0])
        sharded = nn.Sequential(nn.Linear(4, 4))
        sharded[0].weight = nn.Parameter(sw.distribute_tensor(torch.eye(4), mesh, [S0]))
        plain = nn.Sequential(nn.Linear(4, 4))
        for make in (
            lambda: torch.jit.script(sharded),
            lambda: torch.jit.trace(sharded, WHOLE),
            lambda: torch.jit.trace(plain, x),
            lambda: torch.jit.trace(lambda t: t * t.shape[0], (x,)),
            lambda: torch.jit.trace_module(plain, {"forward": (x,)}),
            lambda: torch.export.export(plain, (x,)),
            lambda: torch.export.export(sharded, (WHOLE,)),
        ):
            with pytest.raises(UnsupportedError, match=r"this rank's shard.*x\.full_tensor\(\).*x\.to_local\(\)"):
                make()
        for made in (torch.jit.script(plain), torch.jit.trace(plain, WHOLE)):
            assert torch.equal(made(WHOLE), plain(WHOLE))
            assert torch.equal(made(x).full_tensor(), plain(WHOLE))

    run_ranks(2, _quietly(work))
