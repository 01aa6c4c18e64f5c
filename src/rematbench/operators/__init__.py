"""A model on one rank as named operators: what each operator reads, saves, computes and sends."""
