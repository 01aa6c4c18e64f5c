"""Saved tensors of Transformers: python -m baselines.transformers CONFIG.json --seq-len S -o
OUT.jsonl.

The command traces one step of the model that a config.json describes, with every storage that
autograd keeps, by operator. The record (Traced) names the versions that were traced.
"""

import argparse
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any, get_args

import msgspec
from msgspec import Struct

from baselines.common.interface import NotRunnable
from baselines.transformers.families import config_of
from baselines.transformers.traced_step import Kernel, Setup, StepTrace, run
from rematbench.host.files import write_atomically
from rematbench.worlds.records.record import Provenance, provenance


class Traced(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A traced step: the config as given, the setup, the traced result, and the versions."""

    config: dict[str, Any]
    setup: Setup
    seen: StepTrace
    stack: dict[str, str]
    provenance: Provenance


def traced(config: dict[str, Any], setup: Setup) -> Traced:
    """The trace of a step for a config.json's content; NotRunnable if its family is not traced."""
    return Traced(
        config=config,
        setup=setup,
        seen=run(config_of(config), setup),
        stack={name: version(name) for name in ("transformers", "torch")},
        provenance=provenance(),
    )


def encode(record: Traced) -> bytes:
    return msgspec.json.encode(record, order="sorted") + b"\n"  # one line of a .jsonl file


def main(arguments: list[str]) -> int:
    """Trace one setup. The exit code is 2 for bad input and 1 for a setup that cannot run."""
    parser = argparse.ArgumentParser(prog="python -m baselines.transformers")
    parser.add_argument("config", type=Path, metavar="CONFIG.json")
    parser.add_argument("--seq-len", type=int, required=True)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--precision", choices=("bf16", "fp16", "fp32"), default="bf16")
    parser.add_argument("--attention", choices=get_args(Kernel), default="sdpa")
    parser.add_argument("--checkpointing", action="store_true")
    parser.add_argument("--holds-output", action="store_true")
    parser.add_argument("-o", "--out", type=Path, metavar="OUT.jsonl")
    asked = vars(parser.parse_args(arguments))
    path, out = asked.pop("config"), asked.pop("out")
    try:
        config = msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
        record = traced(config, msgspec.convert(asked, Setup))
    except (OSError, msgspec.DecodeError, msgspec.ValidationError) as error:
        sys.stderr.write(f"{path}: {error}\n")
        return 2
    except NotRunnable as error:
        sys.stderr.write(f"UNSUPPORTED: {error}\n")
        return 1
    if out is not None:
        write_atomically(out, encode(record))
    seen, tokens = record.seen, record.setup.batch * record.setup.seq_len
    for kept in seen.saved:
        where = f"{kept.module} {kept.function} {kept.operator}[{kept.index}]"
        size = f"{kept.nbytes / tokens:,.1f} bytes a token x {kept.layers}"
        sys.stdout.write(f"{where}: {kept.dtype} {list(kept.shape)}, {size}\n")
    for peak in seen.peaks:
        sys.stdout.write(f"{peak.phase}: {peak.activation_bytes:,} bytes at its peak\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
