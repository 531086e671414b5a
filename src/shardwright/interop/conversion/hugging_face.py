"""Write a folder as Hugging Face has it: safetensors files, and an index if there are several."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from typing import NamedTuple, final

from shardwright.checkpoint.format.data_file import SAFETENSORS_DTYPES
from shardwright.errors import CheckpointError
from shardwright.interop.conversion.files import NewFile
from shardwright.interop.conversion.source import ConversionSource, OutputTensor

__all__ = ["HuggingFaceWriter"]

_INDEX = "model.safetensors.index.json"


class _File(NamedTuple):
    name: str
    tensors: list[OutputTensor]


@final
class HuggingFaceWriter:
    """Writes the files of a folder; tied tensors are written once, under the first of their names."""

    def __init__(self, source: ConversionSource, max_shard_size: int, keep: frozenset[str]) -> None:
        self._source = source
        self._tensors = _without_ties(source.tensors, keep)
        for tensor in self._tensors:
            if _name(tensor) is None:
                raise CheckpointError(
                    f"{tensor.name!r} has the dtype {tensor.dtype}, which safetensors does not have; cast it, or leave "
                    "it out with only="
                )
        self._files = _split(self._tensors, max_shard_size)

    @property
    def names(self) -> list[OutputTensor]:
        """The tensors that are written."""
        return self._tensors

    @property
    def nbytes(self) -> int:
        """The number of bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self._tensors)

    def write(self, folder: str, rank: int, ranks: int, progress: Callable[[int], None]) -> None:
        """Write every file whose turn it is for this rank of so many."""
        for file in self._files[rank::ranks]:
            with NewFile(os.path.join(folder, file.name)) as out:
                out.write(_header(file.tensors))
                for tensor in file.tensors:
                    for window in self._source.windows(tensor):
                        out.write_tensor(window)
                        progress(window.nbytes)

    def finish(self, folder: str) -> None:
        """Write the index."""
        if len(self._files) == 1:
            return
        weight_map = {tensor.name: file.name for file in self._files for tensor in file.tensors}
        index = {"metadata": {"total_size": self.nbytes}, "weight_map": dict(sorted(weight_map.items()))}
        with NewFile(os.path.join(folder, _INDEX)) as out:
            out.write(json.dumps(index, indent=2).encode() + b"\n")


def _without_ties(tensors: Sequence[OutputTensor], keep: frozenset[str]) -> list[OutputTensor]:
    """Leave out all but one of tied tensors: the first, or the first of the names in `keep`."""
    chosen: dict[str, OutputTensor] = {}
    for tensor in tensors:
        first = tensor.tied_to or tensor.name
        if first not in chosen or (tensor.name in keep and chosen[first].name not in keep):
            chosen[first] = tensor
    written = {tensor.name for tensor in chosen.values()}
    return [tensor for tensor in tensors if tensor.name in written]


def _split(tensors: Sequence[OutputTensor], limit: int) -> list[_File]:
    """Divide the tensors into files of at most `limit` bytes, where a single tensor is not larger."""
    groups: list[list[OutputTensor]] = [[]]
    size = 0
    for tensor in tensors:
        if groups[-1] and size + tensor.nbytes > limit:
            groups.append([])
            size = 0
        groups[-1].append(tensor)
        size += tensor.nbytes
    if len(groups) == 1:
        return [_File("model.safetensors", _in_order(groups[0]))]
    return [
        _File(f"model-{number:05}-of-{len(groups):05}.safetensors", _in_order(group))
        for number, group in enumerate(groups, 1)
    ]


def _in_order(tensors: Sequence[OutputTensor]) -> list[OutputTensor]:
    """Put large elements first, so that every tensor is aligned, as safetensors does."""
    return sorted(tensors, key=lambda tensor: (-tensor.dtype.itemsize, tensor.name))


def _name(tensor: OutputTensor) -> str | None:
    """Return the name that safetensors has for the dtype of a tensor, if any."""
    return SAFETENSORS_DTYPES.get(str(tensor.dtype).removeprefix("torch."))


def _header(tensors: Sequence[OutputTensor]) -> bytes:
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    at = 0
    for tensor in tensors:
        entries[tensor.name] = {
            "dtype": _name(tensor),
            "shape": list(tensor.shape),
            "data_offsets": [at, at + tensor.nbytes],
        }
        at += tensor.nbytes
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text
