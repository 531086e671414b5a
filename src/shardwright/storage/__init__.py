"""Storage for checkpoints: bytes under keys, in a directory or in memory."""

from shardwright.storage.base import Reader, Storage, Writer
from shardwright.storage.calls import Calls
from shardwright.storage.local import LocalStorage
from shardwright.storage.memory import MemoryStorage

__all__ = ["Calls", "LocalStorage", "MemoryStorage", "Reader", "Storage", "Writer"]
