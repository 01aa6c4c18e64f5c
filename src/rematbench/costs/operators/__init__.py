"""The operators of a model: inputs, outputs, saved activations and kernels."""
