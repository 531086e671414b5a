"""The distributed tensor: op → rule → redistribution → collective."""

from shardwright.tensor import rules
from shardwright.tensor.boundary import distribute_module, distribute_tensor
from shardwright.tensor.compiled import Compiled, compile
from shardwright.tensor.custom import Registration, register_rule
from shardwright.tensor.divergence import verify_ranks
from shardwright.tensor.dtensor import DTensor
from shardwright.tensor.enter import defer_gradient_reduction
from shardwright.tensor.explain import explain
from shardwright.tensor.factories import Making, empty, full, normal, ones, rand, randint, randn, randperm, zeros
from shardwright.tensor.functions import tagged_function
from shardwright.tensor.local_map import local_map
from shardwright.tensor.meta import TensorMeta
from shardwright.tensor.policy import CommunicationWarning, communication, implicit_replication
from shardwright.tensor.random import OffsetBasedRNGTracker, manual_seed
from shardwright.tensor.trace import Movement, Operation, Trace, trace
from shardwright.tensor.visualize import visualize

__all__ = [
    "CommunicationWarning",
    "Compiled",
    "DTensor",
    "Making",
    "Movement",
    "OffsetBasedRNGTracker",
    "Operation",
    "Registration",
    "TensorMeta",
    "Trace",
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
    "rand",
    "randint",
    "randn",
    "randperm",
    "register_rule",
    "rules",
    "tagged_function",
    "trace",
    "verify_ranks",
    "visualize",
    "zeros",
]
