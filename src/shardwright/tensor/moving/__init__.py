"""Between layouts, and between plain tensors and DTensors, as autograd sees it."""
