"""Sharded tensors you can compute with, and checkpoints you can trust, on PyTorch."""

import importlib
import typing

from shardwright import checkpoint, errors, rules, sharded, storage
from shardwright.comm import DeviceMesh, init_device_mesh
from shardwright.interop.mapping import Mapping
from shardwright.layout import Layout, Mesh, Partial, Placement, Ragged, Region, Replicate, Shard
from shardwright.parallel import (
    ColwiseParallel,
    ContextParallel,
    ExpertParallel,
    FSDPModule,
    Ignored,
    MixedPrecisionPolicy,
    Plan,
    Prediction,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    PrepareModuleOutput,
    Replicated,
    RowwiseParallel,
    SequenceParallel,
    auto_plan,
    fully_shard,
    loss_parallel,
    parallelize,
    parallelize_module,
    predict,
    register_fsdp_forward_method,
    shard_batch,
)
from shardwright.tensor import (
    CommunicationWarning,
    DTensor,
    OffsetBasedRNGTracker,
    TensorMeta,
    Trace,
    communication,
    compile,
    defer_gradient_reduction,
    distribute_module,
    distribute_tensor,
    empty,
    explain,
    full,
    implicit_replication,
    local_map,
    manual_seed,
    normal,
    ones,
    rand,
    randint,
    randn,
    randperm,
    register_rule,
    trace,
    verify_ranks,
    visualize,
    zeros,
)

if typing.TYPE_CHECKING:
    from shardwright import interop as interop
    from shardwright import testing as testing
else:  # hidden from type checkers, for which a module with __getattr__ has every name

    def __getattr__(name: str) -> object:
        """Import `interop` and `testing` when they are first used: they are slow to import, or need an extra.

        So they are not in `__all__` either: `from shardwright import *` works without the extra. Without it, `testing`
        is an attribute that does not exist, so `hasattr`, `inspect.getmembers` and completion work.
        """
        if name in ("interop", "testing"):
            try:
                return importlib.import_module(f"shardwright.{name}")
            except ImportError as error:
                raise AttributeError(f"cannot import {__name__}.{name}: {error}") from error
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

    def __dir__() -> list[str]:
        return sorted({*globals(), "interop", "testing"})


__all__ = [
    "ColwiseParallel",
    "CommunicationWarning",
    "ContextParallel",
    "DTensor",
    "DeviceMesh",
    "ExpertParallel",
    "FSDPModule",
    "Ignored",
    "Layout",
    "Mapping",
    "Mesh",
    "MixedPrecisionPolicy",
    "OffsetBasedRNGTracker",
    "Partial",
    "Placement",
    "Plan",
    "Prediction",
    "PrepareModuleInput",
    "PrepareModuleInputOutput",
    "PrepareModuleOutput",
    "Ragged",
    "Region",
    "Replicate",
    "Replicated",
    "RowwiseParallel",
    "SequenceParallel",
    "Shard",
    "TensorMeta",
    "Trace",
    "auto_plan",
    "checkpoint",
    "communication",
    "compile",
    "defer_gradient_reduction",
    "distribute_module",
    "distribute_tensor",
    "empty",
    "errors",
    "explain",
    "full",
    "fully_shard",
    "implicit_replication",
    "init_device_mesh",
    "local_map",
    "loss_parallel",
    "manual_seed",
    "normal",
    "ones",
    "parallelize",
    "parallelize_module",
    "predict",
    "rand",
    "randint",
    "randn",
    "randperm",
    "register_fsdp_forward_method",
    "register_rule",
    "rules",
    "shard_batch",
    "sharded",
    "storage",
    "trace",
    "verify_ranks",
    "visualize",
    "zeros",
]

__version__ = "0.1.0"
