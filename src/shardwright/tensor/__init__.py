"""The distributed tensor: op → rule → redistribution → collective."""

from shardwright.tensor import rules
from shardwright.tensor.boundary import distribute_module, distribute_tensor
from shardwright.tensor.divergence import verify_ranks
from shardwright.tensor.dtensor import DTensor
from shardwright.tensor.enter import defer_gradient_reduction
from shardwright.tensor.explain import explain
from shardwright.tensor.factories import Making, empty, full, normal, ones, rand, randint, randn, randperm, zeros
from shardwright.tensor.functions import tagged_function
from shardwright.tensor.meta import TensorMeta
from shardwright.tensor.policy import CommunicationWarning, communication, implicit_replication
from shardwright.tensor.random import OffsetBasedRNGTracker, manual_seed
from shardwright.tensor.trace import Movement, Operation, Trace, trace
from shardwright.tensor.visualize import visualize

__all__ = [
    "CommunicationWarning",
    "DTensor",
    "Making",
    "Movement",
    "OffsetBasedRNGTracker",
    "Operation",
    "TensorMeta",
    "Trace",
    "communication",
    "defer_gradient_reduction",
    "distribute_module",
    "distribute_tensor",
    "empty",
    "explain",
    "full",
    "implicit_replication",
    "manual_seed",
    "normal",
    "ones",
    "rand",
    "randint",
    "randn",
    "randperm",
    "rules",
    "tagged_function",
    "trace",
    "verify_ranks",
    "visualize",
    "zeros",
]
