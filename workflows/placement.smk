"""Where simulated jobs run: on this machine, or on Slurm with resources from the cluster file."""

from rematbench.inputs.configfile import ConfigError
from rematbench.worlds.slurm.settings import KEYS, load_center

CPU_CLUSTER = config["cluster"] or "this-machine"
SIMULATE_HERE = config["simulate_on"] == "local"
if config["simulate_on"] not in ("local", "slurm"):
    raise WorkflowError(
        f"simulate_on: {config['simulate_on']!r} (allowed: local, slurm)"
    )
if config["cluster"]:
    try:
        load_center(config["cluster"])
    except ConfigError as error:
        raise WorkflowError(f"cluster: {error}") from None


def simulated_resource(key):
    """A function that gives one resource of a simulated bundle; nothing for a local bundle."""
    nothing = 0 if key in ("mem_mb", "runtime") else None
    return lambda wildcards: (
        nothing
        if SIMULATE_HERE
        else load_center(CPU_CLUSTER).simulated_resources()[key]
    )


SIMULATED = {key: simulated_resource(key) for key in KEYS}
