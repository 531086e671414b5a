"""Remote shards over real RPC between 3 processes; one run serves all cases, as RPC can run only once."""

from __future__ import annotations

import gc
import os
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed.rpc as rpc

from shardwright import comm, sharded
from shardwright.errors import CommError, PlacementError, RankFailedError, ShardError, UnsupportedError
from shardwright.sharded import ShardMetadata
from shardwright.testing import RankPool, run_ranks


def _spec(*placements: str) -> sharded.EnumerableShardingSpec:
    """Six rows in three uneven boxes."""
    rows = ((0, 1), (1, 3), (4, 2))
    return sharded.EnumerableShardingSpec(
        [ShardMetadata([at, 0], [count, 2], where) for (at, count), where in zip(rows, placements, strict=True)]
    )


def _whole() -> torch.Tensor:
    return torch.arange(12.0).reshape(6, 2)


def _filled(spec: sharded.ShardingSpec, **how: Any) -> sharded.ShardedTensor:
    made = sharded.empty(spec, 6, 2, init_rrefs=True, **how)
    with torch.no_grad():
        for shard in made.local_shards():
            shard.tensor.copy_(_whole()[shard.metadata.region.slices()])
    comm.gather_bytes(b"")  # wait until all ranks have filled their shards
    return made


def _refusal(kind: type[Exception], call: Callable[[], Any]) -> str:
    with pytest.raises(kind) as raised:
        call()
    return str(raised.value)


def _fetched(tensor: sharded.ShardedTensor) -> dict[int, list[tuple[list[int], bool]]]:
    """Where the shards that were fetched begin, and whether they hold what they should."""
    remote = {
        rank: [reference.to_here() for reference in references] for rank, references in tensor.remote_shards().items()
    }
    return {
        rank: [
            (shard.metadata.shard_offsets, torch.equal(shard.tensor, _whole()[shard.metadata.region.slices()]))
            for shard in shards
        ]
        for rank, shards in remote.items()
    }


def _several_and_none() -> Any:
    """Rank 0 holds two shards, listed around that of rank 2; rank 1 holds none."""
    tensor = _filled(_spec("rank:0/cpu", "rank:2/cpu", "rank:0/cpu"))
    first = _fetched(tensor)
    assert [len(references) for references in tensor.remote_shards().values()] == [len(one) for one in first.values()]
    comm.gather_bytes(b"")
    return first


def _values_are_those_of_now() -> Any:
    tensor = _filled(sharded.ChunkShardingSpec(0, [f"rank:{rank}/cpu" for rank in range(3)]), requires_grad=True)
    remote = tensor.remote_shards()
    before = [references[0].to_here().tensor for references in remote.values()]
    comm.gather_bytes(b"")
    with torch.no_grad():
        tensor.local_tensor().add_(100)
    comm.gather_bytes(b"")
    after = [references[0].to_here().tensor for references in remote.values()]
    comm.gather_bytes(b"")
    return [torch.equal(new, old + 100) for new, old in zip(after, before, strict=True)]


def _after_reshard() -> Any:
    tensor = _filled(_spec("rank:0/cpu", "rank:2/cpu", "rank:0/cpu"))
    tensor.remote_shards()
    tensor.reshard(sharded.ChunkShardingSpec(0, ["rank:2/cpu", "rank:1/cpu"]))
    comm.gather_bytes(b"")
    found = _fetched(tensor)
    comm.gather_bytes(b"")
    return found


def _cut_otherwise_there() -> Any:
    tensor = _filled(_spec("rank:0/cpu", "rank:1/cpu", "rank:2/cpu"))
    alias = tensor.detach()
    alias.reshard(_spec("rank:1/cpu", "rank:2/cpu", "rank:0/cpu"))
    if comm.rank() == 0:
        tensor._become(alias)  # it is ahead of the others
    comm.gather_bytes(b"")
    message = _refusal(ShardError, tensor.remote_shards()[1][0].to_here) if comm.rank() == 0 else ""
    comm.gather_bytes(b"")
    return message


def _worker_names() -> Any:
    """Workers are not numbered as ranks are: trainer1 is worker 0 and rank 1."""
    tensor = _filled(_spec("trainer1/cpu", "trainer2/cpu", "trainer1/cpu"))
    found = _fetched(tensor), [shard.metadata.shard_offsets for shard in tensor.local_shards()]
    whole = tensor.gather(2)
    assert whole is None or torch.equal(whole, _whole())
    unknown = _refusal(CommError, lambda: sharded.empty(_spec("trainer1", "trainer9", "trainer1"), 6, 2))
    comm.gather_bytes(b"")
    return *found, unknown


def _other_workers() -> Any:
    """Each rank gives a shard as that of another rank's worker."""
    me = comm.rank()
    spec = _spec("trainer0", "trainer1", "trainer2")
    metadata = spec.build_metadata(torch.Size([6, 2]), sharded.TensorProperties())
    known = metadata.shards_metadata[me]

    def shards(worker: int) -> list[sharded.Shard]:
        box = ShardMetadata(known.shard_offsets, known.shard_sizes, f"trainer{worker}/cpu")
        return [sharded.Shard(_whole()[box.region.slices()], box)]

    whole = sharded.init_from_local_shards(shards(me), 6, 2).gather(0)
    assert whole is None or torch.equal(whole, _whole())
    build = sharded.ShardedTensor._init_from_local_shards_and_global_metadata
    wrong = shards((me + 1) % 3)
    return (
        _refusal(ShardError, lambda: sharded.init_from_local_shards(wrong, 6, 2)),
        _refusal(RankFailedError, lambda: build(wrong, metadata, run_check=True)),
    )


def _sub_group() -> Any:
    if comm.rank() == 0:
        return None
    group = comm.subgroup((1, 2))
    mine = sharded.Shard.from_tensor_and_offsets(_whole()[3 * (comm.rank() - 1) :][:3], [3 * (comm.rank() - 1), 0])
    made = sharded.init_from_local_shards([mine], 6, 2, process_group=group.process_group, init_rrefs=True)
    outside = _refusal(
        PlacementError, lambda: sharded.empty(_spec("trainer0", "trainer1", "trainer2"), 6, 2, process_group=group)
    )
    found = _fetched(made)
    comm.gather_bytes(b"", group)
    return found, outside


def _freed() -> Any:
    tensor: sharded.ShardedTensor | None = _filled(_spec("rank:0/cpu", "rank:1/cpu", "rank:2/cpu"))
    if comm.rank() == 1:
        tensor = None
        gc.collect()
    comm.gather_bytes(b"")
    held = None
    if tensor is not None:
        held = torch.equal(tensor.remote_shards()[1][0].to_here().tensor, _whole()[1:4])
    comm.gather_bytes(b"")
    return held


CASES = (
    _several_and_none,
    _values_are_those_of_now,
    _after_reshard,
    _cut_otherwise_there,
    _worker_names,
    _other_workers,
    _sub_group,
    _freed,
)


def _all_cases(address: str) -> dict[str, Any]:
    me = comm.rank()
    os.environ["TP_SOCKET_IFNAME"] = "lo"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, about how its RPC uses its process groups
        options = rpc.TensorPipeRpcBackendOptions(init_method=address, _transports=["uv"])
        rpc.init_rpc(f"trainer{me}", rank=(me + 2) % 3, world_size=3, rpc_backend_options=options)
        found = {case.__name__: case() for case in CASES}
        tensor = _filled(_spec("rank:0/cpu", "rank:1/cpu", "rank:2/cpu"))
        rpc.shutdown()
    found["shut down"] = _refusal(CommError, tensor.remote_shards)
    return found


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    """What each case gave, by case and then by rank. RPC is of a process, so these have a pool of their own."""
    with RankPool() as pool:
        results = pool.run(3, _all_cases, f"file://{tmp_path_factory.mktemp('rpc')}/meet")
    return {case: [result[case] for result in results] for case in results[0]}


def test_every_rank_fetches_the_shards_of_all_others(found: dict[str, list[Any]]) -> None:
    two, one = [([0, 0], True), ([4, 0], True)], [([1, 0], True)]
    assert found["_several_and_none"] == [{2: one}, {0: two, 2: one}, {0: two}]


def test_an_rref_fetches_the_current_values(found: dict[str, list[Any]]) -> None:
    assert found["_values_are_those_of_now"] == [[True, True]] * 3


def test_remote_shards_follow_a_reshard(found: dict[str, list[Any]]) -> None:
    first, second = [([0, 0], True)], [([3, 0], True)]
    assert found["_after_reshard"] == [{1: second, 2: first}, {2: first}, {1: second}]


def test_requesting_a_shard_during_a_reshard_raises(found: dict[str, list[Any]]) -> None:
    message = found["_cut_otherwise_there"][0]
    assert "rank 1 has no shard of sizes [1, 2] at offsets [0, 0]: the tensor is sharded differently there" in message


def test_placements_may_name_rpc_workers(found: dict[str, list[Any]]) -> None:
    remote, local, unknown = zip(*found["_worker_names"], strict=True)
    two, one = [([0, 0], True), ([4, 0], True)], [([1, 0], True)]
    assert list(remote) == [{1: two, 2: one}, {2: one}, {1: two}]
    assert list(local) == [[], [[0, 0], [4, 0]], [[1, 0]]]
    assert all(message.startswith("worker 'trainer9' did not return its rank") for message in unknown)


def test_a_placement_must_name_the_worker_that_passes_the_shard(found: dict[str, list[Any]]) -> None:
    told, checked = found["_other_workers"][0]
    assert found["_other_workers"] == [(told, checked)] * 3
    for me in range(3):
        fault = f"rank {me}, shard 0: placement trainer{(me + 1) % 3}/cpu belongs to rank {(me + 1) % 3}: pass only"
        assert fault in told
        assert fault in checked


def test_remote_shards_of_a_subgroup_are_keyed_by_global_rank(found: dict[str, list[Any]]) -> None:
    nothing, (first, outside), (second, _) = found["_sub_group"]
    assert nothing is None
    assert (first, second) == ({2: [([3, 0], True)]}, {1: [([0, 0], True)]})
    assert outside == "placement trainer0/cpu: rank 0 is not in the group of ranks [1, 2]"


def test_an_rref_keeps_its_shard_alive(found: dict[str, list[Any]]) -> None:
    assert found["_freed"] == [True, None, True]


def test_remote_shards_after_rpc_shutdown_raise(found: dict[str, list[Any]]) -> None:
    assert all("RPC is not running here" in message for message in found["shut down"])


def test_init_rrefs_without_rpc_raises_the_same_error_on_all_ranks() -> None:
    def on_rank() -> tuple[str, str, str]:
        spec = sharded.ChunkShardingSpec(0, ["rank:0/cpu", "rank:1/cpu"])
        plain = sharded.zeros(spec, 4)
        return (
            _refusal(CommError, lambda: sharded.zeros(spec, 4, init_rrefs=True)),
            _refusal(UnsupportedError, plain.remote_shards),
            _refusal(CommError, lambda: sharded.zeros(sharded.ChunkShardingSpec(0, ["trainer0", "trainer1"]), 4)),
        )

    first, second = run_ranks(2, on_rank)
    assert first[0] == second[0]
    assert first[0].startswith("init_rrefs: RPC is not running on ranks [0, 1]: call torch.distributed.rpc.init_rpc")
    assert "it was created without RRefs; create it with init_rrefs=True" in first[1]
    assert "worker 'trainer0': RPC is not running here" in first[2]
