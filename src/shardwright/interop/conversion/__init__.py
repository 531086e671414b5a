"""Conversion of checkpoints into other formats, streamed."""

from shardwright.interop.conversion.api import Format, convert

__all__ = ["Format", "convert"]
