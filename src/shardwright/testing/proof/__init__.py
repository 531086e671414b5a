"""Proofs of rules by enumeration: every placement of an operator's inputs, against the operator on whole tensors."""

from shardwright.testing.proof.proving import prove
from shardwright.testing.proof.result import Proof, Verdict

__all__ = ["Proof", "Verdict", "prove"]
