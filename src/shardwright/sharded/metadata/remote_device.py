"""`RemoteDevice`: whose device a shard lies on. What `rank:1/cuda:0` says."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, final

import torch

from shardwright.errors import ArgumentTypeError, PlacementError

__all__ = ["RemoteDevice"]


@final
class RemoteDevice:
    """A device of some process: of a rank, of an RPC worker by its name, or of nobody in particular.

    It is a value and reads like text: `rank:1/cuda:0`, `trainer0/cpu`, `cuda:1`. `rank()`, `worker_name()` and
    `device()` take it apart. Without a device, it is the CPU. PyTorch's own objects of this kind are taken, too.

    >>> where = RemoteDevice("rank:1/cuda:0")
    >>> where.rank(), where.device(), where.worker_name()
    (1, device(type='cuda', index=0), None)
    >>> RemoteDevice("trainer0/cpu").worker_name(), str(RemoteDevice("rank:3"))
    ('trainer0', 'rank:3/cpu')
    >>> RemoteDevice("rank:x/cpu")
    Traceback (most recent call last):
    shardwright.errors.PlacementError: placement 'rank:x/cpu': 'x' is not the number of a rank; write rank:1/cuda:0
    """

    __slots__ = ("_device", "_rank", "_worker")

    def __init__(self, remote_device: Any) -> None:
        self._worker, self._rank, self._device = _parse(_text(remote_device))

    @classmethod
    def of(cls, value: Any) -> RemoteDevice:
        """The value as a RemoteDevice: itself, or what its text says; equal texts are one object.

        >>> RemoteDevice.of("rank:0/cpu") is RemoteDevice.of("rank:0/cpu")
        True
        """
        return value if isinstance(value, RemoteDevice) else _remembered(_text(value))

    def worker_name(self) -> str | None:
        """The name of the RPC worker, if it was given by name."""
        return self._worker

    def rank(self) -> int | None:
        """The global rank, if it was given by rank."""
        return self._rank

    def device(self) -> torch.device:
        """The device there."""
        return self._device

    def on(self, device: torch.device) -> RemoteDevice:
        """The same process, another device.

        >>> RemoteDevice("rank:1/cuda:0").on(torch.device("cpu"))
        RemoteDevice('rank:1/cpu')
        """
        owner = f"rank:{self._rank}" if self._rank is not None else self._worker
        return _remembered(str(device) if owner is None else f"{owner}/{device}")

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
        f"placement {value!r} is a {type(value).__name__}: give text such as 'rank:1/cuda:0', or a device"
    )


@lru_cache(maxsize=65536)
def _remembered(text: str) -> RemoteDevice:
    return RemoteDevice(text)


def _parse(text: str) -> tuple[str | None, int | None, torch.device]:
    owner, slash, device = text.partition("/")
    if not slash:
        if (alone := _device(owner)) is not None:
            return None, None, alone
        device = "cpu"
    where = _device(device)
    # A misspelt device ("cuda:first") must not pass for the name of a worker, whose shards would be on its CPU.
    misspelt = ":" in owner and not owner.startswith("rank:")
    if where is None or not owner or misspelt:
        raise PlacementError(
            f"placement {text!r}: write rank:1/cuda:0, a worker's name such as trainer0/cpu, or a device"
        )
    if not owner.startswith("rank:"):
        return owner, None, where
    number = owner.removeprefix("rank:")
    if not (number.isascii() and number.isdigit()):
        raise PlacementError(f"placement {text!r}: {number!r} is not the number of a rank; write rank:1/cuda:0")
    return None, int(number), where


def _device(text: str) -> torch.device | None:
    try:
        return torch.device(text)
    except RuntimeError:
        return None
