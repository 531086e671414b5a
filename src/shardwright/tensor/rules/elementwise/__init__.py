"""Pointwise operators, and operators that overwrite a tensor."""
