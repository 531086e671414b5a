"""Backward passes: native autograd on local tensors, parameters entered once, gradients of the dual layout."""
