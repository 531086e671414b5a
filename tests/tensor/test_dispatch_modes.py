"""Dispatch modes around a backward pass see local tensors, and `explain` works with backward."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812  # torch's own name for it
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import shardwright as sw
from shardwright.testing import run_ranks

R, S0 = sw.Replicate(), sw.Shard(0)


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(6), nn.Linear(6, 6)

    def forward(self, x: Any) -> Any:
        return x + self.linear(self.norm(x))


def shard(_: str, module: nn.Module, mesh: Any) -> None:
    for name, parameter in module.named_parameters(recurse=False):
        module.register_parameter(name, sw.distribute_tensor(parameter, mesh, [S0]))


def watching(seen: list[Any]) -> Any:
    """A mode that records shapes and computes with its arguments."""

    class Watching(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            for value in args:
                if isinstance(value, Tensor):
                    assert value.numel() == value.reshape(-1).shape[0]
                    seen.append(tuple(value.shape))
            return func(*args, **(kwargs or {}))

    return Watching()


def modes_around_a_backward() -> None:
    mesh = sw.init_device_mesh("cpu", (2,))
    torch.manual_seed(0)
    reference = nn.Sequential(Residual(), Residual()).double()
    batch = torch.randn(8, 6, dtype=torch.float64)
    with FlopCounterMode(display=False) as whole:
        reference(batch).square().mean().backward()

    starts: list[Callable[[Any], None]] = [
        lambda loss: loss.backward(),
        lambda loss: torch.autograd.backward([loss]),
        lambda loss: loss.full_tensor().backward(),
        lambda loss: loss.redistribute(placements=[R]).to_local().backward(),
    ]
    for start in starts:
        for make in (lambda: FlopCounterMode(display=False), lambda: watching([])):
            ours = sw.distribute_module(copy.deepcopy(reference), mesh, shard)
            for parameter in ours.parameters():
                parameter.grad = None
            hooked: list[Any] = []
            x = sw.distribute_tensor(batch, mesh, [S0])
            with make() as mode:
                hidden = ours[0](x)
                hidden.register_hook(lambda gradient, hooked=hooked: hooked.append((gradient * 2).shape))
                start(ours[1](hidden).square().mean())
            assert hooked == [batch.shape]
            for mine, theirs in zip(ours.parameters(), reference.parameters(), strict=True):
                assert theirs.grad is not None
                torch.testing.assert_close(mine.grad.full_tensor(), theirs.grad)
            if isinstance(mode, FlopCounterMode):
                assert mode.get_total_flops() * 2 == whole.get_total_flops()  # each rank does half of the work
    assert torch._C._len_torch_dispatch_stack() == 0


def test_dispatch_modes_see_local_operators_and_do_not_change_gradients() -> None:
    run_ranks(2, modes_around_a_backward)


PROGRAMS: dict[str, Callable[[Any, Any], Any]] = {
    "linear": lambda x, w: F.linear(x, w),
    "matmul": lambda x, w: x @ w,
    "layer_norm": lambda x, w: F.layer_norm(x, (8,), w[0], w[1]),
    "group_norm": lambda x, w: F.group_norm(x.unsqueeze(-1), 2, w[0], w[1]),
    "rms_norm": lambda x, w: F.rms_norm(x, (8,), w[0]),
    "batch_norm": lambda x, w: F.batch_norm(x, None, None, w[0], w[1], training=True),
    "softmax": lambda x, w: (x @ w).softmax(-1),
    "log_softmax": lambda x, w: (x @ w).log_softmax(-1),
    "gelu": lambda x, w: F.gelu(x * w[0]),
    "silu": lambda x, w: F.silu(x * w[0]),
    "tanh": lambda x, w: (x @ w).tanh(),
    "hardswish": lambda x, w: F.hardswish(x @ w),
    "cross_entropy": lambda x, w: F.cross_entropy(x @ w, (x @ w).detach().argmax(-1)),
    "mse_loss": lambda x, w: F.mse_loss(x @ w, x),
    "smooth_l1_loss": lambda x, w: F.smooth_l1_loss(x @ w, x),
    "attention": lambda x, w: F.scaled_dot_product_attention(*((x @ w).reshape(4, 2, 2, 4),) * 3),
    "conv": lambda x, w: F.conv1d(x.unsqueeze(1), w[:, :3].unsqueeze(1)),
    "max_pool": lambda x, w: F.max_pool1d((x @ w).unsqueeze(1), 2),
    "avg_pool": lambda x, w: F.avg_pool1d((x @ w).unsqueeze(1), 2),
    "embedding": lambda x, w: F.embedding(x.detach().long().clamp(0, 3), w),
    "gather": lambda x, w: (x @ w).gather(1, x.detach().long().clamp(0, 3)),
    "cumsum": lambda x, w: (x @ w).cumsum(-1),
    "sort": lambda x, w: (x @ w).sort(-1).values,
    "norm": lambda x, w: (x @ w).norm(dim=-1),
    "interpolate": lambda x, w: F.interpolate((x @ w).unsqueeze(1), scale_factor=2.0, mode="linear"),
    "dropout": lambda x, w: F.dropout(x @ w),
    "index": lambda x, w: (x @ w)[:, [0, 2]],
    "prelu": lambda x, w: F.prelu(x @ w, w[0, :1]),
    "glu": lambda x, w: F.glu(x @ w),
    "huber": lambda x, w: F.huber_loss(x @ w, x),
    "binary": lambda x, w: F.binary_cross_entropy_with_logits(x @ w, x.detach().sigmoid()),
    "cdist": lambda x, w: torch.cdist(x, w),
    "logsumexp": lambda x, w: (x @ w).logsumexp(0),
    "std": lambda x, w: (x @ w).std(0),
    "where": lambda x, w: torch.where(x > 0, x @ w, x * w[0]),
    "checkpoint": lambda x, w: torch.utils.checkpoint.checkpoint(torch.matmul, x, w, use_reentrant=False),
    "full": lambda x, w: (x @ w).tanh().full_tensor(),
}


def explained() -> None:
    mesh = sw.init_device_mesh("cpu", (2,))
    torch.manual_seed(0)
    rows, weights = torch.randn(8, 8), torch.randn(8, 8)
    failed = {}
    for name, program in PROGRAMS.items():
        for placement in (R, S0):

            def step(x: Any, w: Any, program: Any = program) -> None:
                (program(x, w) ** 2).sum().backward()
                assert w.grad is None or w.grad.shape == w.shape

            x = sw.distribute_tensor(rows, mesh, [S0]).requires_grad_()
            w = nn.Parameter(sw.distribute_tensor(weights, mesh, [placement]))
            try:
                foreseen = sw.explain(step, x, w, quiet=True)
            except (RuntimeError, TypeError, ValueError, IndexError, NotImplementedError) as error:
                failed[name, placement] = f"{type(error).__name__} {error}"[:200]
                continue
            with sw.trace() as seen:
                step(x, w)
            mine = [(str(move.source), str(move.target)) for move in foreseen.redistributions if move.received]
            if mine != [(str(move.source), str(move.target)) for move in seen.redistributions if move.received]:
                failed[name, placement] = "other movements than those of the program itself"
    assert not failed, "\n".join(f"{key}: {value}" for key, value in failed.items())


def test_explain_of_a_program_with_backward_matches_its_communication() -> None:
    run_ranks(2, explained)
