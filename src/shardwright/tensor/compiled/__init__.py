"""`compile`: capture what a function does to this rank's local tensors, and replay it without dispatch."""

from shardwright.tensor.compiled.api import Compiled, compile

__all__ = ["Compiled", "compile"]
