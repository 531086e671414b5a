"""Train in parallel: batches, plans and parallel models."""

from shardwright.parallel.batch import shard_batch
from shardwright.parallel.context import ContextParallel
from shardwright.parallel.experts import ExpertParallel
from shardwright.parallel.fsdp import FSDPModule, UnshardHandle, fully_shard, register_fsdp_forward_method
from shardwright.parallel.parallelize import parallelize
from shardwright.parallel.parallelize_module import loss_parallel, parallelize_module
from shardwright.parallel.plan.auto import auto_plan
from shardwright.parallel.plan.plan import Plan
from shardwright.parallel.plan.styles import (
    ColwiseParallel,
    Ignored,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    PrepareModuleOutput,
    Replicated,
    RowwiseParallel,
    SequenceParallel,
)
from shardwright.parallel.predict import PredictedParameter, PredictedUnit, Prediction, predict
from shardwright.parallel.units import MixedPrecisionPolicy

__all__ = [
    "ColwiseParallel",
    "ContextParallel",
    "ExpertParallel",
    "FSDPModule",
    "Ignored",
    "MixedPrecisionPolicy",
    "ParallelStyle",
    "Plan",
    "PredictedParameter",
    "PredictedUnit",
    "Prediction",
    "PrepareModuleInput",
    "PrepareModuleInputOutput",
    "PrepareModuleOutput",
    "Replicated",
    "RowwiseParallel",
    "SequenceParallel",
    "UnshardHandle",
    "auto_plan",
    "fully_shard",
    "loss_parallel",
    "parallelize",
    "parallelize_module",
    "predict",
    "register_fsdp_forward_method",
    "shard_batch",
]
