"""Executed cells on a cluster: what to submit, what a node must have, and running a bundle.

Snakemake's Slurm executor submits one job per bundle; inside it, `run-cells` runs the bundle's
cells one after the other, each by torchrun, on all nodes of the allocation.
"""
