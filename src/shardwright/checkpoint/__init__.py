"""Checkpoints: a state saved as safetensors files and one manifest, atomically, checked, loaded under any layout."""

from shardwright.checkpoint.api import async_save, load, read, save
from shardwright.checkpoint.background import AsyncSave, SaveProgress
from shardwright.checkpoint.format.values import Codec, Opaque
from shardwright.checkpoint.manage.clean_up import Removal
from shardwright.checkpoint.manage.describe import StepInfo
from shardwright.checkpoint.manage.restore import CheckpointWarning
from shardwright.checkpoint.manage.retention import KeepBest
from shardwright.checkpoint.manager import CheckpointManager
from shardwright.checkpoint.metadata import (
    STATE_DICT_TYPE,
    STORAGE_TYPES,
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageInfo,
    StorageMeta,
    TensorStorageMetadata,
    TensorWriteData,
    WriteItem,
    WriteItemType,
    chunk_list,
    local_tensor_for,
    write_items,
)
from shardwright.checkpoint.reader import Checkpoint, LazyTensor, StoredRange, open
from shardwright.checkpoint.remove import remove
from shardwright.checkpoint.repair import RepairedFile, RepairReport, repair
from shardwright.checkpoint.state.marks import PerRank, Stateful
from shardwright.checkpoint.state.optimizer import OptimizerState, optimizer_state
from shardwright.checkpoint.verify import Corruption, VerifyReport, verify
from shardwright.checkpoint.writing.staging import release_buffers
from shardwright.sharded import TensorProperties, flatten_sharded_tensors

__all__ = [
    "STATE_DICT_TYPE",
    "STORAGE_TYPES",
    "AsyncSave",
    "BytesStorageMetadata",
    "Checkpoint",
    "CheckpointManager",
    "CheckpointWarning",
    "ChunkStorageMetadata",
    "Codec",
    "Corruption",
    "KeepBest",
    "LazyTensor",
    "Metadata",
    "MetadataIndex",
    "Opaque",
    "OptimizerState",
    "PerRank",
    "Removal",
    "RepairReport",
    "RepairedFile",
    "SaveProgress",
    "Stateful",
    "StepInfo",
    "StorageInfo",
    "StorageMeta",
    "StoredRange",
    "TensorProperties",
    "TensorStorageMetadata",
    "TensorWriteData",
    "VerifyReport",
    "WriteItem",
    "WriteItemType",
    "async_save",
    "chunk_list",
    "flatten_sharded_tensors",
    "load",
    "local_tensor_for",
    "open",
    "optimizer_state",
    "read",
    "release_buffers",
    "remove",
    "repair",
    "save",
    "verify",
    "write_items",
]
