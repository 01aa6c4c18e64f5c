"""A model on one rank as named operators: what each reads, saves, computes and sends."""
