"""Backward passes on local tensors: parameters redistributed once per step, gradients of the dual layout."""
