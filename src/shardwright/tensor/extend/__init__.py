"""What users add: rules for their operators, functions of local tensors, autograd functions."""
