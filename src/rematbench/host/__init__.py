"""The machine that runs rematbench: memory, CPUs, worker processes, scratch folders."""
