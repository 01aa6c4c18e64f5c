"""What a problem is: model, cluster, system, layout and workload, read from files and checked."""
