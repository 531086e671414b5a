"""The same promises on a CUDA device: a world of one on NCCL, and ranks that share the device over gloo.

Several GPUs are declared unproved: there is none to test on.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import shardwright as sw
from shardwright import comm
from shardwright.errors import UnsupportedError
from shardwright.testing import run_ranks

pytestmark = pytest.mark.gpu
EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def train(device: str, shape: tuple[int, ...], names: tuple[str, ...], steps: int = 6) -> list[float]:
    """The losses of a transformer, data × tensor parallel, dropout on, in double precision."""
    sys.path.insert(0, str(EXAMPLES))
    from importlib import import_module

    transformer, parallel = import_module("transformer"), import_module("02_tensor_parallel")
    mesh = sw.init_device_mesh(device, shape, mesh_dim_names=names)
    sw.manual_seed(1)
    model = transformer.Transformer(layers=2, dropout=0.1).double().to(device)
    parallel.shard(model, mesh)
    model.reset()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for step in range(steps):
        tokens = torch.randint(0, 96, (8, 33), generator=torch.Generator().manual_seed(step)).to(device)
        loss = model(sw.distribute_tensor(tokens, mesh, [sw.Shard(0), sw.Replicate()], src_data_rank=None))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.fixture(scope="module")
def on_cpu() -> list[float]:
    return run_ranks(1, train, "cpu", (1, 1), ("dp", "tp"))[0]


def test_ranks_that_share_the_device_over_gloo_give_the_cpus_losses(on_cpu: list[float]) -> None:
    for losses in run_ranks(4, train, "cuda", (2, 2), ("dp", "tp"), timeout=150.0):
        assert losses == pytest.approx(on_cpu, rel=1e-9)


def test_a_world_of_one_on_nccl_gives_the_cpus_losses(on_cpu: list[float]) -> None:
    def work() -> list[float]:
        comm.forget()
        dist.destroy_process_group()
        try:
            losses = train("cuda", (1, 1), ("dp", "tp"))
            assert dist.get_backend() == "nccl"
            return losses
        finally:
            comm.forget()
            dist.destroy_process_group()

    from shardwright.testing import RankPool

    with RankPool() as pool:  # a pool of its own: these ranks leave their world
        assert pool.run(1, _alone, work, timeout=150.0)[0] == pytest.approx(on_cpu, rel=1e-9)


def _alone(work: Any) -> Any:
    import os

    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(name, None)
    return work()


def test_every_redistribution_is_exact_on_the_device() -> None:
    def work() -> None:
        mesh = sw.init_device_mesh("cuda", (2, 2), mesh_dim_names=("dp", "tp"))
        whole = torch.arange(35.0, device="cuda").reshape(7, 5)
        places = [sw.Replicate(), sw.Shard(0), sw.Shard(1), sw.Partial()]
        for first in places:
            for second in places:
                for third in places:
                    source = [sw.Shard(0), first] if first != sw.Partial() else [first, sw.Shard(1)]
                    x = sw.distribute_tensor(whole, mesh).redistribute(placements=source)
                    y = x.redistribute(placements=[second, third])
                    assert y.is_cuda
                    assert torch.equal(y.full_tensor(), whole), (source, second, third)

    run_ranks(4, work, timeout=150.0)


def test_gradients_agree_with_one_device() -> None:
    def work() -> None:
        mesh = sw.init_device_mesh("cuda", (4,), mesh_dim_names=("dp",))
        torch.manual_seed(0)
        plain_x = torch.randn(10, 6, dtype=torch.float64, device="cuda")
        plain_w = torch.randn(6, 3, dtype=torch.float64, device="cuda", requires_grad=True)
        torch.softmax(plain_x @ plain_w, 0).pow(2).sum().backward()
        for place in (sw.Replicate(), sw.Shard(0), sw.Shard(1)):
            x = sw.distribute_tensor(plain_x, mesh, [sw.Shard(0)])
            w = sw.distribute_tensor(plain_w.detach(), mesh, [place]).requires_grad_()
            torch.softmax(x @ w, 0).pow(2).sum().backward()
            torch.testing.assert_close(w.grad.full_tensor(), plain_w.grad)

    run_ranks(4, work, timeout=150.0)


def test_random_numbers_on_the_device_equal_the_cpus() -> None:
    def work() -> None:
        cpu, cuda = (sw.init_device_mesh(device, (2,)) for device in ("cpu", "cuda"))
        for make in (sw.rand, sw.randn):
            drawn = []
            for mesh in (cpu, cuda):
                sw.manual_seed(3)
                drawn.append(
                    make(9, 5, mesh=mesh, placements=[sw.Shard(0)], device=mesh.device_type).full_tensor().cpu()
                )
            torch.testing.assert_close(*drawn, rtol=1e-6, atol=1e-6)
        sw.manual_seed(3)
        x = torch.nn.functional.dropout(sw.ones(40, mesh=cuda, placements=[sw.Shard(0)], device="cuda"), 0.5)
        sw.manual_seed(3)
        y = torch.nn.functional.dropout(sw.ones(40, mesh=cpu, placements=[sw.Shard(0)]), 0.5)
        assert torch.equal(x.full_tensor().cpu(), y.full_tensor())

    run_ranks(2, work, timeout=150.0)


def test_a_triton_kernel_is_not_launched_on_a_shard(tmp_path: Path) -> None:
    """Triton takes addresses from `data_ptr()`, and sizes from its caller, who takes them from `shape`."""
    pytest.importorskip("triton")
    file = tmp_path / "triton_kernel.py"
    file.write_text(DOUBLE)

    def work() -> None:
        double = _double(file)
        mesh = sw.init_device_mesh("cuda", (2,))
        whole = torch.arange(64.0, device="cuda")
        sharded = sw.distribute_tensor(whole, mesh, [sw.Shard(0)])
        partial = sw.DTensor.from_local(whole / 2, mesh, [sw.Partial()])
        for x in (sharded, partial):
            with pytest.raises(UnsupportedError, match=r"data_ptr.*x\.to_local\(\).*x\.full_tensor\(\)"):
                double[(1,)](x, x.numel(), SIZE=64)
            with pytest.raises(UnsupportedError, match="__cuda_array_interface__"):
                _ = x.__cuda_array_interface__
        local = sharded.to_local()
        double[(1,)](local, local.numel(), SIZE=64)
        assert torch.equal(sharded.full_tensor(), whole * 2)
        replicated = sw.distribute_tensor(whole, mesh, [sw.Replicate()])
        double[(1,)](replicated, replicated.numel(), SIZE=64)
        assert torch.equal(replicated.full_tensor(), whole * 2)

    run_ranks(2, work, timeout=150.0)


DOUBLE = """
import triton
import triton.language as tl

@triton.jit
def double(pointer, size, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    tl.store(pointer + at, tl.load(pointer + at, mask=at < size) * 2, mask=at < size)
"""


def _double(file: Path) -> Any:
    """A Triton kernel: Triton reads its source from a file."""
    from importlib.util import module_from_spec, spec_from_file_location

    spec = spec_from_file_location("triton_kernel", file)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.double


def test_recurrent_modules_move_to_the_device_with_sharded_weights() -> None:
    """Torch gathers the weights of plain ones in one buffer, by their addresses."""

    def work() -> None:
        import warnings

        warnings.simplefilter("ignore")  # weights that are not in one buffer are compacted at every call
        torch.manual_seed(0)
        plain = torch.nn.LSTM(4, 6)
        mesh = sw.init_device_mesh("cuda", (2,))
        layer = torch.nn.LSTM(4, 6)
        layer.load_state_dict(plain.state_dict())
        layer, plain = layer.cuda(), plain.cuda()
        sw.distribute_module(
            layer,
            mesh,
            lambda name, module, mesh: [
                module.register_parameter(key, sw.distribute_tensor(parameter, mesh, [sw.Shard(0)]))
                for key, parameter in list(module.named_parameters(recurse=False))
            ],
        )
        layer.to(torch.float64).flatten_parameters()
        x = torch.randn(3, 2, 4, dtype=torch.float64, device="cuda")
        found = layer(sw.distribute_tensor(x, mesh, [sw.Replicate()]))[0]
        torch.testing.assert_close(found.full_tensor(), plain.double()(x)[0])

    run_ranks(2, work, timeout=150.0)
