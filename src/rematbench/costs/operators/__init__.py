"""The operators of a model: what each reads, saves and computes."""
