"""What the cluster file and a measurement suite say about jobs: inputs and resources of rules."""

from shutil import which

from rematbench.configfile import ConfigError
from rematbench.slurm.cells import Campaign, load_measurement
from rematbench.slurm.patience import be_patient
from rematbench.slurm.resources import KEYS, executed_resources, simulated_resources
from rematbench.slurm.settings import load_site

CAMPAIGNS = {}
be_patient()


def campaign(wildcards):
    """A measurement suite on its cluster; read once."""
    name = wildcards.measured
    if name not in CAMPAIGNS:
        suite = load_measurement(Path(f"config/{name}.yaml"))
        CAMPAIGNS[name] = Campaign(suite, REGISTRY, config["cluster"])
    return CAMPAIGNS[name]


def bundle_of(wildcards):
    return campaign(wildcards).bundle(wildcards.bundle)


def bundle_files(wildcards):
    """The files of a bundle's method."""
    method = bundle_of(wildcards).cells[0].variant.method
    return [
        path for path in campaign(wildcards).origins(method) if Path(path).is_file()
    ]


def campaign_files(wildcards):
    """The files of every method of a suite."""
    cells = campaign(wildcards).cells
    methods = {cell.variant.method for cell in cells}
    found = {path for m in methods for path in campaign(wildcards).origins(m)}
    return sorted(path for path in found if Path(path).is_file())


def from_site(key):
    """One resource of a bundle, from the cluster file."""
    return lambda wildcards: executed_resources(
        campaign(wildcards).site, bundle_of(wildcards)
    )[key]


def cluster_option(wildcards):
    return f"--cluster {config['cluster']}" if config["cluster"] else ""


SIMULATE_HERE = config["simulate_on"] == "local"
if config["simulate_on"] not in ("local", "slurm"):
    raise WorkflowError(
        f"simulate_on: {config['simulate_on']!r} (allowed: local, slurm)"
    )
if config["ask_slurm"] and not (
    workflow.dryrun or workflow.remote_exec or which("sbatch")
):
    raise WorkflowError(
        "no Slurm here: sbatch is not on PATH (without --profile slurm it runs here)"
    )
if config["cluster"]:
    try:
        load_site(config["cluster"])
    except ConfigError as error:
        raise WorkflowError(f"cluster: {error}") from None


def simulated_resource(key):
    """One resource of a simulated bundle that is not run locally."""
    cluster = config["cluster"] or "this-machine"
    nothing = 0 if key in ("mem_mb", "runtime") else None
    return lambda wildcards: (
        nothing if SIMULATE_HERE else simulated_resources(load_site(cluster))[key]
    )
