"""The kinds of steps that programs are made of."""

from shardwright.testing.programs.steps.kinds import KINDS, Step

__all__ = ["KINDS", "Step"]
