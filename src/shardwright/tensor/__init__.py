"""DTensor: operators, rules, redistribution, gradients, random numbers."""

from shardwright.tensor import rules
from shardwright.tensor.api import async_dtensor, parameter_value, tracked_copy
from shardwright.tensor.api.distribute import distribute_tensor
from shardwright.tensor.api.dtensor import DTensor
from shardwright.tensor.api.factories import (
    FactoryOptions,
    empty,
    full,
    normal,
    ones,
    rand,
    randint,
    randn,
    randperm,
    zeros,
)
from shardwright.tensor.api.modules import distribute_module
from shardwright.tensor.api.tensor_meta import TensorMeta
from shardwright.tensor.base.divergence import verify_ranks
from shardwright.tensor.base.policy import CommunicationWarning, communication, implicit_replication
from shardwright.tensor.base.trace import Operation, Redistribution, Trace, trace
from shardwright.tensor.compiled import Compiled, compile
from shardwright.tensor.debug.explain import explain
from shardwright.tensor.debug.picture import picture
from shardwright.tensor.debug.visualize import visualize
from shardwright.tensor.extend.custom import Registration, register_rule
from shardwright.tensor.extend.local_map import local_map
from shardwright.tensor.gradients.enter import defer_gradient_reduction
from shardwright.tensor.random import OffsetBasedRNGTracker, manual_seed

__all__ = [
    "CommunicationWarning",
    "Compiled",
    "DTensor",
    "FactoryOptions",
    "OffsetBasedRNGTracker",
    "Operation",
    "Redistribution",
    "Registration",
    "TensorMeta",
    "Trace",
    "async_dtensor",
    "communication",
    "compile",
    "defer_gradient_reduction",
    "distribute_module",
    "distribute_tensor",
    "empty",
    "explain",
    "full",
    "implicit_replication",
    "local_map",
    "manual_seed",
    "normal",
    "ones",
    "parameter_value",
    "picture",
    "rand",
    "randint",
    "randn",
    "randperm",
    "register_rule",
    "rules",
    "trace",
    "tracked_copy",
    "verify_ranks",
    "visualize",
    "zeros",
]
