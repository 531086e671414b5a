"""Workers of torch.distributed.rpc: their names and ranks, and calls on them. One run of RPC serves all cases."""

from __future__ import annotations

import os
import warnings
from typing import Any

import pytest
import torch.distributed.rpc as rpc

from shardwright import comm
from shardwright.errors import CommError
from shardwright.testing import RankPool


def test_rpc_workers_report_their_rank_and_run_calls(tmp_path: Any) -> None:
    """RPC ranks are in reverse order, and one worker is a master without a process group."""

    def on_rank(address: str) -> dict[str, Any]:
        me = comm.rank()
        os.environ["TP_SOCKET_IFNAME"] = "lo"
        found: dict[str, Any] = {"before": comm.worker_name()}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's own, about how its RPC uses its process groups
            options = rpc.TensorPipeRpcBackendOptions(init_method=address, _transports=["uv"])
            name = ("trainer0", "trainer1", "master")[me]
            if name == "master":
                comm.leave()
            rpc.init_rpc(name, rank=2 - me, world_size=3, rpc_backend_options=options)
            found["name"] = comm.worker_name()
            if name != "master":
                found["ranks"] = [comm.rank_of_worker(f"trainer{number}") for number in (0, 1)]
                found["sum"] = comm.call_remotely("master", sum, [1, 2, me]).to_here()
                for case, call in {
                    "outside": lambda: comm.rank_of_worker("master"),
                    "unknown": lambda: comm.rank_of_worker("trainer7"),
                    "calling unknown": lambda: comm.call_remotely("trainer7", sum, [1]),
                }.items():
                    with pytest.raises(CommError) as raised:
                        call()
                    found[case] = str(raised.value)
            rpc.shutdown()
        found["after"] = comm.worker_name()
        return found

    with RankPool() as pool:
        first, second, master = pool.run(3, on_rank, f"file://{tmp_path}/meet")
    assert [results["name"] for results in (first, second, master)] == ["trainer0", "trainer1", "master"]
    assert [results["before"] for results in (first, second, master)] == [None] * 3
    assert [results["after"] for results in (first, second, master)] == [None] * 3
    assert first["ranks"] == second["ranks"] == [0, 1]
    assert (first["sum"], second["sum"]) == (3, 4)
    assert first["outside"] == "worker 'master' is not in a process group: call init_process_group there"
    assert first["unknown"].startswith("worker 'trainer7' did not return its rank: ")
    assert first["calling unknown"].startswith("calling worker 'trainer7' failed: ")


def test_without_rpc_worker_functions_raise() -> None:
    assert comm.worker_name() is None
    with pytest.raises(CommError, match="worker 'trainer0': RPC is not running here"):
        comm.rank_of_worker("trainer0")
    with pytest.raises(CommError, match="calling worker 'trainer0': RPC is not running here"):
        comm.call_remotely("trainer0", sum, [1])
