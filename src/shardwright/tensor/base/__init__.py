"""What the dispatcher is built on: tagging, gradient types, strategies, the registry, traces and policies."""
