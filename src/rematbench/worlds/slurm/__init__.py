"""Executed cells on a Slurm cluster: submissions, and the run of a bundle.

Snakemake's Slurm executor submits one job per bundle.  In the job, `run-cells` runs the bundle's
cells one after the other, each by torchrun on all nodes of the allocation.
"""
