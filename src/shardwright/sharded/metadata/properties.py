"""`TensorProperties`: dtype, layout, requires_grad, memory format and pinning of a tensor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, final

import torch
from torch import Tensor

from shardwright.errors import ArgumentTypeError, UnsupportedError

__all__ = ["MEM_FORMAT_ENCODING", "TensorProperties", "empty_of", "has_memory_format", "memory_format_of"]


class MEM_FORMAT_ENCODING(Enum):  # noqa: N801  the name PyTorch users know
    """Numbers that encode memory formats, because torch.memory_format objects cannot be pickled.

    >>> MEM_FORMAT_ENCODING.TORCH_CHANNELS_LAST.value
    1
    """

    TORCH_CONTIGUOUS_FORMAT = 0
    TORCH_CHANNELS_LAST = 1
    TORCH_PRESERVE_FORMAT = 2


_ENCODED = {
    torch.contiguous_format: MEM_FORMAT_ENCODING.TORCH_CONTIGUOUS_FORMAT,
    torch.channels_last: MEM_FORMAT_ENCODING.TORCH_CHANNELS_LAST,
    torch.preserve_format: MEM_FORMAT_ENCODING.TORCH_PRESERVE_FORMAT,
}
_DECODED = {encoding: memory_format for memory_format, encoding in _ENCODED.items()}


@final
@dataclass
class TensorProperties:
    """dtype, layout, requires_grad, memory format and pinning of a tensor. Can be pickled and converted to JSON.

    >>> properties = TensorProperties(dtype=torch.bfloat16, pin_memory=True)
    >>> properties.to_json()
    {'dtype': 'bfloat16', 'layout': 'strided', 'requires_grad': False, 'memory_format': 0, 'pin_memory': True}
    >>> TensorProperties.from_json(properties.to_json()) == properties
    True
    """

    dtype: torch.dtype = field(default_factory=torch.get_default_dtype)
    layout: torch.layout = field(default=torch.strided)
    requires_grad: bool = False
    memory_format: torch.memory_format = field(default=torch.contiguous_format)
    pin_memory: bool = False

    @staticmethod
    def create_from_tensor(tensor: Tensor) -> TensorProperties:
        """Return the properties of this tensor.

        >>> TensorProperties.create_from_tensor(torch.zeros(2, dtype=torch.int8)).dtype
        torch.int8
        """
        return TensorProperties(
            dtype=tensor.dtype,
            layout=tensor.layout,
            requires_grad=tensor.requires_grad,
            memory_format=memory_format_of(tensor) or torch.contiguous_format,
            pin_memory=tensor.is_pinned() if tensor.device.type == "cpu" else False,
        )

    def to_json(self) -> dict[str, Any]:
        """Return plain values for JSON; the memory format is encoded by `MEM_FORMAT_ENCODING`."""
        return {
            "dtype": _name(self.dtype),
            "layout": _name(self.layout),
            "requires_grad": self.requires_grad,
            "memory_format": _encode(self.memory_format).value,
            "pin_memory": self.pin_memory,
        }

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> TensorProperties:
        """Build the properties from the output of `to_json`."""
        return cls(
            dtype=_named(value["dtype"], torch.dtype),
            layout=_named(value["layout"], torch.layout),
            requires_grad=bool(value["requires_grad"]),
            memory_format=_decode(value["memory_format"]),
            pin_memory=bool(value["pin_memory"]),
        )

    def __getstate__(self) -> tuple[Any, ...]:
        return self.dtype, self.layout, self.requires_grad, _encode(self.memory_format), self.pin_memory

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self.dtype, self.layout, self.requires_grad, encoding, self.pin_memory = state
        self.memory_format = _decode(encoding)


def memory_format_of(tensor: Tensor) -> torch.memory_format | None:
    """Return the memory format of a tensor: contiguous, channels last, or None if neither.

    >>> memory_format_of(torch.zeros(2, 3).T) is None
    True
    """
    if tensor.layout != torch.strided or tensor.is_contiguous():
        return torch.contiguous_format
    return torch.channels_last if has_memory_format(tensor, torch.channels_last) else None


def has_memory_format(tensor: Tensor, memory_format: torch.memory_format) -> bool:
    """True if the tensor has this memory format. One channel, one pixel or no element has both formats.

    >>> [has_memory_format(torch.zeros(2, channels, 4, 4), torch.channels_last) for channels in (1, 3)]
    [True, False]
    """
    if memory_format != torch.channels_last:
        return tensor.is_contiguous()
    return tensor.ndim == 4 and (not tensor.numel() or tensor.is_contiguous(memory_format=torch.channels_last))


def empty_of(properties: TensorProperties, size: Sequence[int], device: torch.device) -> Tensor:
    """Return an uninitialised tensor with these properties, except requires_grad."""
    last = properties.memory_format == torch.channels_last
    return torch.empty(
        tuple(size),
        dtype=properties.dtype,
        device=device,
        pin_memory=properties.pin_memory,
        memory_format=torch.channels_last if last else torch.contiguous_format,
    )


def _encode(memory_format: torch.memory_format) -> MEM_FORMAT_ENCODING:
    encoding = _ENCODED.get(memory_format)
    if encoding is None:
        raise UnsupportedError(
            f"memory format {memory_format} cannot be encoded: use one of {', '.join(map(str, _ENCODED))}"
        )
    return encoding


def _decode(encoding: Any) -> torch.memory_format:
    try:
        return _DECODED[MEM_FORMAT_ENCODING(encoding)]
    except ValueError:
        expected = ", ".join(f"{member.value} ({member.name})" for member in MEM_FORMAT_ENCODING)
        raise UnsupportedError(f"unknown memory format encoding {encoding!r}: expected one of {expected}") from None


def _name(value: torch.dtype | torch.layout) -> str:
    return str(value).removeprefix("torch.")


def _named(name: Any, kind: type) -> Any:
    value = getattr(torch, name, None) if isinstance(name, str) else None
    if not isinstance(value, kind):
        raise ArgumentTypeError(f"{name!r} does not name a torch.{kind.__name__}")
    return value
