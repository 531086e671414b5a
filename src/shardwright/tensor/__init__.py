"""The distributed tensor: op → rule → redistribution → collective."""

from shardwright.tensor import rules
from shardwright.tensor.base.divergence import verify_ranks
from shardwright.tensor.base.policy import CommunicationWarning, communication, implicit_replication
from shardwright.tensor.base.trace import Movement, Operation, Trace, trace
from shardwright.tensor.compiled import Compiled, compile
from shardwright.tensor.dispatch import picked
from shardwright.tensor.dtensor import DTensor
from shardwright.tensor.extend.custom import Registration, register_rule
from shardwright.tensor.extend.local_map import local_map
from shardwright.tensor.factories import Making, empty, full, normal, ones, rand, randint, randn, randperm, zeros
from shardwright.tensor.gradients.enter import defer_gradient_reduction
from shardwright.tensor.meta import TensorMeta
from shardwright.tensor.moving.boundary import distribute_tensor
from shardwright.tensor.moving.modules import distribute_module
from shardwright.tensor.random import OffsetBasedRNGTracker, manual_seed
from shardwright.tensor.seeing.explain import explain
from shardwright.tensor.seeing.visualize import visualize

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
    "picked",
    "rand",
    "randint",
    "randn",
    "randperm",
    "register_rule",
    "rules",
    "trace",
    "verify_ranks",
    "visualize",
    "zeros",
]
