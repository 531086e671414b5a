"""Tracing and explaining communication, the communication policy, and `verify_ranks`."""

from __future__ import annotations

import re
import threading
import time
import warnings
from datetime import timedelta

import pytest
import torch
from rich.console import Console

import shardwright as sw
from shardwright import comm
from shardwright.errors import ArgumentTypeError, CommunicationError
from shardwright.testing import Raised, Returned, outcomes, run_ranks


def step(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return torch.relu(x @ w).sum()


def operands(ranks: int) -> tuple[torch.Tensor, torch.Tensor]:
    mesh = sw.init_device_mesh("cpu", (ranks,), mesh_dim_names=("dp",))
    x = sw.distribute_tensor(torch.ones(8, 8), mesh, [sw.Shard(0)])
    return x, sw.distribute_tensor(torch.ones(8, 8), mesh, [sw.Shard(0)]).requires_grad_()


def test_trace_records_operators_redistributions_and_collectives_with_bytes_and_source_lines() -> None:
    def work() -> None:
        x, w = operands(4)
        with sw.trace() as seen, comm.count() as traffic:
            loss = step(x, w)
            loss.backward()
            loss.item()
        assert [operation.name for operation in seen.operations] == ["matmul", "relu", "sum"]
        assert seen.operations[0].where.startswith("test_seeing.py:")
        gather, scatter, total = seen.redistributions
        assert (gather.operation, gather.requested, gather.backward) == ("matmul", False, False)
        assert scatter.backward
        assert total.requested
        assert gather.received == 3 * 8 * 2 * 4
        assert seen.received == traffic.bytes
        assert len(seen.collectives) == sum(traffic.calls.values())
        assert "for matmul" in str(seen)
        assert "(requested)" in str(seen)

    run_ranks(4, work)


def test_nothing_is_recorded_without_an_open_trace() -> None:
    x, w = operands(1)
    with sw.trace() as seen:
        pass
    step(x, w)
    assert seen.events == []


def test_explain_predicts_every_byte_without_communicating() -> None:
    def work() -> None:
        x, w = operands(4)
        with comm.count() as traffic:
            predicted = sw.explain(step, x, w, quiet=True)
        with sw.trace() as real:
            step(x, w)
        assert traffic.calls.total() == 0
        assert [m.received for m in predicted.redistributions] == [m.received for m in real.redistributions]
        assert predicted.received == real.received

    run_ranks(4, work)


def test_explain_leaves_a_module_unchanged(capsys: pytest.CaptureFixture[str]) -> None:
    mesh = sw.init_device_mesh("cpu", (1,))
    layer = sw.distribute_module(torch.nn.Linear(4, 2), mesh)
    before = layer.weight
    sw.explain(layer, sw.ones(3, 4, mesh=mesh))
    assert layer.weight is before
    assert not layer.weight.is_meta
    assert "linear" in capsys.readouterr().out


def test_communication_policy_warns_about_or_rejects_implicit_redistribution() -> None:
    def work() -> None:
        x, w = operands(2)
        partial = sw.ones(4, mesh=x.device_mesh, placements=[sw.Partial()])
        with sw.communication("explicit"):
            x + x  # needs no communication
            partial.redistribute(placements=[sw.Replicate()])  # explicit
            assert partial.sum().item() == 8.0  # so is item()
            with pytest.raises(CommunicationError, match=r"relu needs \[4\] \(dp: P\(sum\)\) as \[4\] \(dp: R\)"):
                partial.relu()
            with pytest.raises(CommunicationError, match="matmul needs"):
                x @ w
        with sw.communication("warn"), pytest.warns(sw.CommunicationWarning, match="relu needs"):
            partial.relu()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            partial.relu()

    run_ranks(2, work)


def test_unknown_policy_raises() -> None:
    with (
        pytest.raises(CommunicationError, match="policy must be 'implicit', 'warn' or 'explicit', got 'sometimes'"),
        sw.communication("sometimes"),
    ):
        pass


def test_verify_ranks_names_the_ranks_whose_programs_differ_with_operator_and_line() -> None:
    def work() -> None:
        mesh = sw.init_device_mesh("cpu", (3,), mesh_dim_names=("dp",))
        x, y = (sw.ones(6, mesh=mesh, placements=[sw.Partial()]) for _ in range(2))
        with sw.verify_ranks():
            x.relu()  # the same on all ranks
            if comm.rank() == 1:
                y.tanh()
            else:
                y.redistribute(placements=[sw.Shard(0)])

    for outcome in outcomes(3, work, timeout=30):
        assert outcome.kind == "ProgramMismatchError"
        assert "rank 1: tanh at test_seeing.py:" in outcome.message
        assert "rank 0: redistribute at test_seeing.py:" in outcome.message


def test_visualize_does_not_communicate() -> None:
    def work() -> str:
        mesh = sw.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        x = sw.ones(4, 6, mesh=mesh, placements=[sw.Shard(0)])
        console = Console(width=60, force_terminal=False)
        with comm.count() as traffic, console.capture() as capture:
            sw.visualize(x, console=console)
            repr(x), str(x), x.shape, x.stride()
        assert traffic.calls.total() == 0
        return capture.get()

    first, second = run_ranks(2, work)
    assert first == second
    assert "rank 1" in first


def test_visualize_rejects_plain_tensors() -> None:
    with pytest.raises(ArgumentTypeError, match="expected a DTensor or a Layout, got Tensor"):
        sw.visualize(torch.ones(2))


def test_collective_timeout_names_the_ranks_that_did_not_join() -> None:
    """Without `verify_ranks`: one rank waits for a redistribution that the others never start."""

    def work() -> None:
        impatient = torch.distributed.new_group([0, 1, 2], timeout=timedelta(seconds=1))
        mesh = sw.DeviceMesh.from_group(impatient, "cpu", mesh_dim_names=("impatient",))
        x = sw.ones(6, mesh=mesh, placements=[sw.Shard(0)])
        if comm.rank() == 1:
            x.redistribute(placements=[sw.Replicate()])
        else:
            time.sleep(8)

    first, second, third = outcomes(3, work, timeout=40)
    assert isinstance(second, Raised)
    assert second.kind == "RankLostError"
    for rank in (0, 2):
        assert re.search(rf"rank {rank}: computing, at \S+test_seeing.py:\d+", second.message)
    assert isinstance(first, Returned)
    assert isinstance(third, Returned)


def test_traces_of_two_threads_may_overlap() -> None:
    untraced = vars(sw.DTensor)["__torch_function__"]
    opened, closed = threading.Event(), threading.Event()
    mesh = sw.init_device_mesh("cpu", (1,))

    def other() -> None:
        with sw.trace():
            opened.set()
            closed.wait(10)

    thread = threading.Thread(target=other)
    with sw.trace():
        assert vars(sw.DTensor)["__torch_function__"] is not untraced
        thread.start()
        opened.wait(10)
    closed.set()
    thread.join(10)
    with sw.trace() as seen:
        pass
    sw.ones(2, mesh=mesh) * 2
    assert seen.events == []
    assert vars(sw.DTensor)["__torch_function__"] is untraced
