"""`RemoteDevice`: a device of a rank or RPC worker, written `rank:1/cuda:0`."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, final

import torch

from shardwright.errors import ArgumentTypeError, PlacementError

__all__ = ["RemoteDevice"]


@final
class RemoteDevice:
    """A device of a rank, of a named RPC worker, or of an unspecified process.

    Written as `rank:1/cuda:0`, `trainer0/cpu` or `cuda:1`; `rank()`, `worker_name()` and `device()` return its parts.
    The device defaults to the CPU. PyTorch's own `_remote_device` is accepted, too.

    >>> where = RemoteDevice("rank:1/cuda:0")
    >>> where.rank(), where.device(), where.worker_name()
    (1, device(type='cuda', index=0), None)
    >>> RemoteDevice("trainer0/cpu").worker_name(), str(RemoteDevice("rank:3"))
    ('trainer0', 'rank:3/cpu')
    >>> RemoteDevice("rank:x/cpu")
    Traceback (most recent call last):
    shardwright.errors.PlacementError: placement 'rank:x/cpu': 'x' is not a rank; write rank:1/cuda:0
    """

    __slots__ = ("_device", "_rank", "_worker")

    def __init__(self, remote_device: Any) -> None:
        self._worker, self._rank, self._device = _parse(_text(remote_device))

    @classmethod
    def of(cls, value: Any) -> RemoteDevice:
        """Return the value as a RemoteDevice; equal strings give the same object.

        >>> RemoteDevice.of("rank:0/cpu") is RemoteDevice.of("rank:0/cpu")
        True
        """
        return value if isinstance(value, RemoteDevice) else _interned(_text(value))

    def worker_name(self) -> str | None:
        """Return the name of the RPC worker, or None if the placement names a rank."""
        return self._worker

    def rank(self) -> int | None:
        """Return the global rank, or None if the placement names no rank."""
        return self._rank

    def device(self) -> torch.device:
        """Return the device on that process."""
        return self._device

    def on(self, device: torch.device) -> RemoteDevice:
        """Return another device of the same process.

        >>> RemoteDevice("rank:1/cuda:0").on(torch.device("cpu"))
        RemoteDevice('rank:1/cpu')
        """
        owner = f"rank:{self._rank}" if self._rank is not None else self._worker
        return _interned(str(device) if owner is None else f"{owner}/{device}")

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, RemoteDevice):
            return NotImplemented
        return (self._worker, self._rank, self._device) == (other._worker, other._rank, other._device)

    def __hash__(self) -> int:
        return hash((self._worker, self._rank, self._device))

    def __str__(self) -> str:
        if self._rank is not None:
            return f"rank:{self._rank}/{self._device}"
        return str(self._device) if self._worker is None else f"{self._worker}/{self._device}"

    def __repr__(self) -> str:
        return f"RemoteDevice({str(self)!r})"

    def __reduce__(self) -> tuple[type[RemoteDevice], tuple[str]]:
        return RemoteDevice, (str(self),)


def _text(value: Any) -> str:
    if isinstance(value, str | torch.device | RemoteDevice) or (
        hasattr(value, "worker_name") and hasattr(value, "rank")
    ):
        return str(value)
    raise ArgumentTypeError(
        f"placement must be a str such as 'rank:1/cuda:0' or a device, got {type(value).__name__}: {value!r}"
    )


@lru_cache(maxsize=65536)
def _interned(text: str) -> RemoteDevice:
    return RemoteDevice(text)


def _parse(text: str) -> tuple[str | None, int | None, torch.device]:
    owner, slash, device = text.partition("/")
    if not slash:
        if (local_device := _device(owner)) is not None:
            return None, None, local_device
        device = "cpu"
    parsed = _device(device)
    # A misspelt device ("cuda:first") must not be taken for a worker name with the CPU as device.
    misspelt = ":" in owner and not owner.startswith("rank:")
    if parsed is None or not owner or misspelt:
        raise PlacementError(
            f"placement {text!r}: write rank:1/cuda:0, a worker's name such as trainer0/cpu, or a device"
        )
    if not owner.startswith("rank:"):
        return owner, None, parsed
    number = owner.removeprefix("rank:")
    if not (number.isascii() and number.isdigit()):
        raise PlacementError(f"placement {text!r}: {number!r} is not a rank; write rank:1/cuda:0")
    return None, int(number), parsed


def _device(text: str) -> torch.device | None:
    try:
        return torch.device(text)
    except RuntimeError:
        return None
