"""Proofs of rules by enumeration: every placement of the inputs, compared with the operator on full tensors."""

from shardwright.testing.proof.proving import prove
from shardwright.testing.proof.result import Proof, Verdict

__all__ = ["Proof", "Verdict", "prove"]
