"""The names that pickles of checkpoints use, and what stands for each: everything else is refused.

`STATE` is for what `torch.save` writes, `METADATA` for the metadata of PyTorch's distributed checkpoints. A name gets
here by an entry in these tables, never by a pattern.
"""

from __future__ import annotations

import torch

from shardwright.checkpoint.format.values import DTYPES
from shardwright.interop.formats.pickled import values
from shardwright.interop.formats.pickled.machine import Instance, Kind, Table

__all__ = ["METADATA", "STATE"]


def _types(module: str, *names: str) -> dict[tuple[str, str], Kind]:
    return {(module, name): Kind(f"{module}.{name}", is_type=True) for name in names}


def _constants(module: str, *names: str) -> dict[tuple[str, str], Kind]:
    return {(module, name): Kind(f"{module}.{name}") for name in names}


def _dtype_of_numpy() -> Kind:
    kind = Kind("numpy.dtype")
    kind.make = lambda *arguments: Instance(kind, arguments)
    return kind


_STORAGES = {
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
    "ComplexFloatStorage": torch.complex64,
    "ComplexDoubleStorage": torch.complex128,
}
_ARRAY = Kind("numpy.ndarray", is_type=True)
_BUILTINS = ("builtins", "__builtin__")

_PLAIN: Table = {
    ("collections", "OrderedDict"): Kind("collections.OrderedDict", make=values.mapping),
    ("collections", "defaultdict"): Kind("collections.defaultdict", make=values.counted),
    ("collections", "Counter"): Kind("collections.Counter", make=values.counted),
    ("collections", "deque"): Kind("collections.deque", make=values.sequence),
    **_types("collections", "ChainMap"),
    ("torch", "Size"): Kind("torch.Size", make=values.size),
    ("torch", "device"): Kind("torch.device", make=values.device),
    ("torch.serialization", "_get_layout"): Kind("torch.serialization._get_layout", make=lambda name: str(name)),
    ("_codecs", "encode"): Kind("_codecs.encode", make=values.encoded),
    **{("torch", name): Kind(f"torch.{name}", value=dtype) for name, dtype in DTYPES.items()},
    **{
        (module, name): Kind(f"{module}.{name}", make=values.path)
        for module in ("pathlib", "pathlib._local")
        for name in ("PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath")
    },
    **{
        (module, name): Kind(f"builtins.{name}", make=make)
        for module in _BUILTINS
        for name, make in (
            ("set", values.unordered),
            ("frozenset", values.unordered),
            ("complex", values.complex_number),
        )
    },
    **{
        key: kind
        for module in _BUILTINS
        for key, kind in _constants(module, "bool", "int", "float", "str", "bytes", "list", "tuple", "dict").items()
    },
}

STATE: Table = {
    **_PLAIN,
    **{("torch", name): Kind(f"torch.{name}", value=dtype) for name, dtype in _STORAGES.items()},
    ("torch.storage", "UntypedStorage"): Kind("torch.storage.UntypedStorage", value=torch.uint8),
    ("torch._utils", "_rebuild_tensor"): Kind("torch._utils._rebuild_tensor", make=values.tensor),
    ("torch._utils", "_rebuild_tensor_v2"): Kind("torch._utils._rebuild_tensor_v2", make=values.tensor),
    ("torch._utils", "_rebuild_tensor_v3"): Kind("torch._utils._rebuild_tensor_v3", make=values.tensor_of_dtype),
    ("torch._utils", "_rebuild_parameter"): Kind("torch._utils._rebuild_parameter", make=lambda data, *_options: data),
    ("torch._utils", "_rebuild_parameter_with_state"): Kind(
        "torch._utils._rebuild_parameter_with_state", make=lambda data, *_options: data
    ),
    ("torch._utils", "_rebuild_wrapper_subclass"): Kind(
        "torch._utils._rebuild_wrapper_subclass", make=values.wrapped_tensor
    ),
    ("torch._tensor", "_rebuild_from_type_v2"): Kind("torch._tensor._rebuild_from_type_v2", make=values.tensor_of_type),
    **_types("torch.nn.parameter", "Parameter", "Buffer"),
    **_types("torch", "Tensor"),
    **_types("torch.distributed.tensor", "DTensor"),
    **_types("torch.distributed.tensor._api", "DTensor"),
    **_types("torch.distributed._tensor.api", "DTensor"),
    **_types("torch.distributed.tensor._dtensor_spec", "DTensorSpec", "TensorMeta", "ShardOrderEntry"),
    **_types("torch.distributed._mesh_layout", "_MeshLayout", "_FlatLayout"),
    **_types("torch.distributed._tensor.placement_types", "DTensorSpec", "TensorMeta", "Shard", "Replicate"),
    **_types("torch.distributed.tensor.placement_types", "Shard", "Replicate", "_StridedShard"),
    **_types("torch.distributed.device_mesh", "DeviceMesh"),
    **_types("argparse", "Namespace"),
    **_types("types", "SimpleNamespace"),
    ("numpy", "dtype"): _dtype_of_numpy(),
    ("numpy", "ndarray"): _ARRAY,
    **{
        (module, "scalar"): Kind(f"{module}.scalar", make=values.numpy_scalar)
        for module in ("numpy.core.multiarray", "numpy._core.multiarray")
    },
    **{
        (module, "_reconstruct"): Kind(f"{module}._reconstruct", make=values.numpy_array(_ARRAY))
        for module in ("numpy.core.multiarray", "numpy._core.multiarray")
    },
}

_CHECKPOINT = "torch.distributed.checkpoint"
METADATA: Table = {
    **_PLAIN,
    **_types(
        f"{_CHECKPOINT}.metadata",
        "Metadata",
        "TensorStorageMetadata",
        "TensorProperties",
        "ChunkStorageMetadata",
        "BytesStorageMetadata",
        "MetadataIndex",
        "StorageMeta",
    ),
    (f"{_CHECKPOINT}.metadata", "_MEM_FORMAT_ENCODING"): Kind("_MEM_FORMAT_ENCODING", make=lambda number: number),
    **_types(f"{_CHECKPOINT}.filesystem", "_StorageInfo", "_StoragePrefix"),
    # Before January 2024.
    **_types("torch.distributed._shard.sharded_tensor.metadata", "TensorProperties"),
    ("torch.distributed._shard.sharded_tensor.metadata", "MEM_FORMAT_ENCODING"): Kind(
        "MEM_FORMAT_ENCODING", make=lambda number: number
    ),
    # Megatron's, of the format torch_dist.
    **_types("megatron.core.dist_checkpointing.strategies.torch", "MCoreMetadata"),
    **_types("megatron.core.dist_checkpointing.mapping", "MCoreMetadata"),
}
