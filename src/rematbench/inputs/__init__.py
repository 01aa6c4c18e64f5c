"""Model, cluster, system, layout and workload of a problem, read from files and checked."""
