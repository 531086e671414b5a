"""Read pickles without executing anything: a machine of its own, and a table of the names that it knows."""

from shardwright.interop.formats.pickled.machine import Instance, Kind, read_pickle
from shardwright.interop.formats.pickled.names import METADATA, STATE

__all__ = ["METADATA", "STATE", "Instance", "Kind", "read_pickle"]
