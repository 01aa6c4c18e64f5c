"""The matrix of models, lengths and clusters."""
