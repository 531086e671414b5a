"""Background saves of CUDA tensors: copied on a separate stream into pinned memory, after kernels queued before."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from shardwright import checkpoint
from shardwright.checkpoint.writing import staging
from shardwright.storage import Calls, LocalStorage

pytestmark = pytest.mark.gpu

MIB = 1 << 20


def _state() -> dict[str, torch.Tensor]:
    whole = torch.rand(2048, 3000, device="cuda")
    return {
        "whole": whole,
        "turned": whole.t(),
        "sliced": whole[3::5, 7:],
        "half": whole.to(torch.bfloat16),
        "conj": torch.view_as_complex(torch.rand(500, 2, device="cuda")).conj(),
        "host": torch.rand(1000, 33),
        "scalar": torch.tensor(3, device="cuda"),
        "empty": torch.ones(0, 4, device="cuda"),
        **{f"small{number}": torch.rand(number % 7, 9, device="cuda")[:, ::2] for number in range(100)},
        **{f"bytes{number}": torch.full((number,), number, device="cuda", dtype=torch.uint8) for number in range(50)},
    }


@pytest.mark.parametrize("memory", [None, 3 * MIB])
def test_kernels_launched_after_async_save_do_not_change_the_saved_values(tmp_path: Path, memory: int | None) -> None:
    for attempt in range(3):
        state = _state()
        before = {name: tensor.resolve_conj().cpu().clone() for name, tensor in state.items()}
        saving = checkpoint.async_save(state, tmp_path / str(attempt), memory=memory)
        for tensor in state.values():
            tensor.fill_(7)
        torch.cuda.synchronize()
        saving.wait()
        loaded = checkpoint.read(tmp_path / str(attempt))
        for name, tensor in before.items():
            assert torch.equal(loaded[name], tensor), name


def test_kernels_launched_before_async_save_are_included(tmp_path: Path) -> None:
    weights = torch.zeros(4 * MIB, device="cuda")
    slow = torch.rand(4096, 4096, device="cuda")
    for _ in range(50):
        slow = slow @ slow
    weights.add_(1)  # behind the multiplications, and before the save
    checkpoint.async_save({"w": weights}, tmp_path).wait()
    assert checkpoint.read(tmp_path)["w"].unique().tolist() == [1]
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(50):
            slow = slow @ slow
        weights.add_(1)
        saving = checkpoint.async_save({"w": weights}, tmp_path)  # the stream of its caller counts
        weights.add_(1)
    saving.wait()
    assert checkpoint.read(tmp_path)["w"].unique().tolist() == [2]


def test_staging_buffers_are_pinned_sized_to_the_state_and_reused(tmp_path: Path) -> None:
    checkpoint.release_buffers()
    allocations = staging.buffers.allocations
    state = {"w": torch.rand(5 * MIB, device="cuda")}
    for attempt in range(3):
        checkpoint.async_save(state, tmp_path / str(attempt)).wait()
    assert staging.buffers.allocations == allocations + 1
    assert staging.buffers.kept == 20 * MIB
    buffer = staging.buffers.take(MIB, MIB, pinned=True)
    assert buffer.tensor.is_pinned()
    staging.buffers.give(buffer)
    checkpoint.release_buffers()
    assert not buffer.tensor.is_pinned()


@pytest.mark.filterwarnings("ignore:.*Profiler clears events")  # of older torch, once a process, about what we want
def test_small_tensors_are_copied_from_the_device_in_few_transfers(tmp_path: Path) -> None:
    state = {str(number): torch.full((1000,), float(number), device="cuda") for number in range(500)}
    checkpoint.async_save(state, tmp_path).wait()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
        checkpoint.async_save(state, tmp_path).wait()
    copies = [event for event in seen.events() if "Memcpy DtoH" in event.name]
    assert 1 <= len(copies) <= 4
    loaded = checkpoint.read(tmp_path)
    assert all(loaded[name].unique().tolist() == [float(name)] for name in state)


def test_save_copies_cuda_tensors_in_windows_within_the_memory_limit(tmp_path: Path) -> None:
    sizes: list[int] = []

    class Counted(Calls):
        def pwritev(self, fd: int, buffers: object, offset: int) -> int:
            sizes.append(sum(buffer.nbytes for buffer in buffers))  # type: ignore[attr-defined]  # memoryviews
            return super().pwritev(fd, buffers, offset)  # type: ignore[arg-type]  # likewise

    state = _state()
    checkpoint.save(state, LocalStorage(tmp_path, Counted()), memory=2 * MIB)
    assert max(sizes) <= 2 * MIB
    loaded = checkpoint.read(tmp_path)
    for name, tensor in state.items():
        assert torch.equal(loaded[name], tensor.resolve_conj().cpu()), name
