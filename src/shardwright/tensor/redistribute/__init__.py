"""Redistribution: plan the steps from one layout to another, and execute them on the ranks."""

from shardwright.tensor.redistribute.execute import PendingRedistribution, execute, local_shape, start
from shardwright.tensor.redistribute.groups import Groups, WorldGroups
from shardwright.tensor.redistribute.plan import Plan
from shardwright.tensor.redistribute.planner import plan
from shardwright.tensor.redistribute.steps import (
    AllGather,
    AllReduce,
    AllToAll,
    Exchange,
    ReduceScatter,
    Scale,
    Slice,
    Step,
    ToPartial,
)

__all__ = [
    "AllGather",
    "AllReduce",
    "AllToAll",
    "Exchange",
    "Groups",
    "PendingRedistribution",
    "Plan",
    "ReduceScatter",
    "Scale",
    "Slice",
    "Step",
    "ToPartial",
    "WorldGroups",
    "execute",
    "local_shape",
    "plan",
    "start",
]
