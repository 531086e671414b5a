"""Extensions by users: rules for operators, and functions of local tensors."""
