"""`python -m rematbench.worlds.slurm.check_node SECONDS [gpus]`: facts of this node as JSON."""

import sys

import msgspec

from rematbench.worlds.slurm.nodefacts import node_facts


def main() -> None:
    """Print the facts of this node, with a canary of SECONDS; `gpus`: count the GPUs that torch
    sees."""
    facts = node_facts(float(sys.argv[1]), count_gpus="gpus" in sys.argv[2:])
    sys.stdout.write(msgspec.json.encode(facts).decode() + "\n")


if __name__ == "__main__":
    main()
