"""The machine below: memory, CPUs, worker processes, scratch folders."""
