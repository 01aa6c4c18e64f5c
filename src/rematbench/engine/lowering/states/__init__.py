"""Parameters, gradients and optimizer states: their gathers, reductions, updates and bytes."""
