"""Captured programs: what a function does to this rank's local tensors, recorded once, repeated without dispatch."""

from shardwright.tensor.compiled.api import Compiled, compile

__all__ = ["Compiled", "compile"]
