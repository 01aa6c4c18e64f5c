"""What a user states of a job (model, cluster, stack, layout, workload), read and checked."""
