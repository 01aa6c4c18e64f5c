"""Inputs and resources of the rules for executed cells, from the cluster file and the suite."""

from shutil import which

from rematbench.host.console import CommandError
from rematbench.worlds.records.store import Store
from rematbench.worlds.slurm.campaign import Campaign, load_campaign_suite, refuse


include: "placement.smk"


CAMPAIGNS = {}


def campaign(wildcards):
    """A measurement suite on its cluster, read once per suite."""
    name = wildcards.measured
    if name not in CAMPAIGNS:
        suite = load_campaign_suite(Path(f"config/{name}.yaml"))
        CAMPAIGNS[name] = Campaign(suite, REGISTRY, config["cluster"])
        if workflow.dryrun:
            check_submissions(name)
    return CAMPAIGNS[name]


def check_submissions(name):
    """WorkflowError where a job cannot run or the jobs to submit exceed `max_gpu_hours`."""
    store = Store(Path(f"results/{name}/cells"))
    try:
        refuse(CAMPAIGNS[name], store, max_gpu_hours=config["max_gpu_hours"])
    except CommandError as error:
        raise WorkflowError(str(error)) from None


onstart:
    if workflow.is_main_process:
        if not (workflow.local_exec or which("sbatch")):
            raise WorkflowError(
                "no Slurm here: sbatch is not on PATH (without --profile slurm it runs here)"
            )
        for name in CAMPAIGNS:
            check_submissions(name)


def bundle_of(wildcards):
    return campaign(wildcards).bundle(wildcards.bundle)


def bundle_keys(wildcards):
    """The keys of a bundle's cells, which cover request, method and code.  A change of one method
    changes the keys of its bundles only; a newer file time alone changes no key."""
    return [campaign(wildcards).key(cell) for cell in bundle_of(wildcards).cells]


def from_center(key):
    """A function that gives one resource of a bundle from the cluster file."""

    def resource(wildcards):
        job = bundle_of(wildcards)
        center = campaign(wildcards).center
        return center.executed_resources(job.nodes, job.gpus_per_node, job.minutes)[key]

    return resource


def shell_setup(wildcards):
    return campaign(wildcards).center.slurm.shell_setup()


def cluster_option(wildcards):
    return f"--cluster {config['cluster']}" if config["cluster"] else ""


def measure_targets(measured):
    """The table of all cells, the table of speeds, and the output of the figure's script (the
    reason where no figure is drawn)."""
    return [
        f"results/{measured}/executed.csv",
        f"results/{measured}/tables/measured_speed.md",
        f"results/{measured}/figures/measured_speed.txt",
    ]
