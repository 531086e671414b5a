"""Communication, the only user of torch.distributed: groups, collectives, traffic, and agreement among ranks."""

from shardwright.comm.agree import agree, common_error, on_first_rank, unwrap_common_error
from shardwright.comm.collectives import (
    all_gather,
    all_to_all,
    broadcast,
    start_all_gather,
    start_all_to_all,
    start_broadcast,
)
from shardwright.comm.coordinate import gather_bytes
from shardwright.comm.exchange import exchange, start_exchange
from shardwright.comm.fold import ReduceOp
from shardwright.comm.group import Group, forget, mesh_group, on_change, on_forget, subgroup, world
from shardwright.comm.join import host_store, join, leave, reach_store
from shardwright.comm.ledger import moving_tensor
from shardwright.comm.many import (
    all_gather_many,
    reduce_scatter_many,
    start_all_gather_many,
    start_reduce_scatter_many,
)
from shardwright.comm.mesh import (
    DeviceMesh,
    bind,
    current_mesh,
    device_mesh_of,
    entered_mesh,
    group_along,
    init_device_mesh,
    init_world_mesh,
    rank,
)
from shardwright.comm.pending import Pending
from shardwright.comm.reduce import (
    all_reduce,
    all_reduce_,
    reduce_scatter,
    start_all_reduce,
    start_reduce_scatter,
)
from shardwright.comm.rpc import call_remotely, rank_of_worker, worker_name
from shardwright.comm.simulate import device_type, is_simulated, simulate
from shardwright.comm.timeout import default_timeout
from shardwright.comm.traffic import Traffic, Transfer, count, listen

__all__ = [
    "DeviceMesh",
    "Group",
    "Pending",
    "ReduceOp",
    "Traffic",
    "Transfer",
    "agree",
    "all_gather",
    "all_gather_many",
    "all_reduce",
    "all_reduce_",
    "all_to_all",
    "bind",
    "broadcast",
    "call_remotely",
    "common_error",
    "count",
    "current_mesh",
    "default_timeout",
    "device_mesh_of",
    "device_type",
    "entered_mesh",
    "exchange",
    "forget",
    "gather_bytes",
    "group_along",
    "host_store",
    "init_device_mesh",
    "init_world_mesh",
    "is_simulated",
    "join",
    "leave",
    "listen",
    "mesh_group",
    "moving_tensor",
    "on_change",
    "on_first_rank",
    "on_forget",
    "rank",
    "rank_of_worker",
    "reach_store",
    "reduce_scatter",
    "reduce_scatter_many",
    "simulate",
    "start_all_gather",
    "start_all_gather_many",
    "start_all_reduce",
    "start_all_to_all",
    "start_broadcast",
    "start_exchange",
    "start_reduce_scatter",
    "start_reduce_scatter_many",
    "subgroup",
    "unwrap_common_error",
    "worker_name",
    "world",
]
