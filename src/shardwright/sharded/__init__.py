"""ShardedTensor: a tensor as explicit regions on ranks, with metadata, specs, gather, reshard and operators."""

from shardwright.sharded import ops
from shardwright.sharded.base.tensor_base import ShardedTensorBase
from shardwright.sharded.build import init_from_local_shards
from shardwright.sharded.clip import clip_grad_norm_
from shardwright.sharded.convert import from_dtensor, to_dtensor
from shardwright.sharded.factories import ShardedFactoryOptions, empty, full, ones, rand, randn, zeros
from shardwright.sharded.hooks import pre_load_state_dict_hook, state_dict_hook
from shardwright.sharded.metadata.process_group import load_with_process_group
from shardwright.sharded.metadata.properties import MEM_FORMAT_ENCODING, TensorProperties
from shardwright.sharded.metadata.remote_device import RemoteDevice
from shardwright.sharded.metadata.shard import Shard
from shardwright.sharded.metadata.spec import (
    ChunkShardingSpec,
    EnumerableShardingSpec,
    LayoutShardingSpec,
    ShardingSpec,
    infer_sharding_spec,
)
from shardwright.sharded.metadata.tensor_metadata import ShardedTensorMetadata, ShardMetadata
from shardwright.sharded.module import Sharder, ShardingPlan, shard_module, shard_parameter
from shardwright.sharded.nested import flatten_sharded_tensors
from shardwright.sharded.ops.custom import custom_sharded_op_impl
from shardwright.sharded.optimizer import ShardedOptimizer, named_params_with_sharded_tensor
from shardwright.sharded.output_hooks import collect_local_shard, reshard_output
from shardwright.sharded.tensor import ShardedTensor
from shardwright.sharded.transfer.transfer_plan import TransferPlan, plan_transfer, plan_transfer_for_rank

__all__ = [
    "MEM_FORMAT_ENCODING",
    "ChunkShardingSpec",
    "EnumerableShardingSpec",
    "LayoutShardingSpec",
    "RemoteDevice",
    "Shard",
    "ShardMetadata",
    "ShardedFactoryOptions",
    "ShardedOptimizer",
    "ShardedTensor",
    "ShardedTensorBase",
    "ShardedTensorMetadata",
    "Sharder",
    "ShardingPlan",
    "ShardingSpec",
    "TensorProperties",
    "TransferPlan",
    "clip_grad_norm_",
    "collect_local_shard",
    "custom_sharded_op_impl",
    "empty",
    "flatten_sharded_tensors",
    "from_dtensor",
    "full",
    "infer_sharding_spec",
    "init_from_local_shards",
    "load_with_process_group",
    "named_params_with_sharded_tensor",
    "ones",
    "ops",
    "plan_transfer",
    "plan_transfer_for_rank",
    "pre_load_state_dict_hook",
    "rand",
    "randn",
    "reshard_output",
    "shard_module",
    "shard_parameter",
    "state_dict_hook",
    "to_dtensor",
    "zeros",
]
