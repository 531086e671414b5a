"""Checkpoints that others wrote, read as tables of tensors over byte ranges. Nothing of them is executed."""

from shardwright.interop.formats.contents import ForeignContents
from shardwright.interop.formats.recognise import read_foreign
from shardwright.interop.formats.stored import ForeignFile, Location, Record
from shardwright.interop.formats.torch_archive import Archive

__all__ = ["Archive", "ForeignContents", "ForeignFile", "Location", "Record", "read_foreign"]
