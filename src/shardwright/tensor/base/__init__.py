"""What lies beneath the dispatcher: tags, gradient types, strategies, the registry, traces and policies."""
