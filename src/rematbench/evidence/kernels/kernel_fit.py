"""Refit config/kernels/ from results/published/kernels.csv: shares of rates, and the files.

`python -m rematbench.evidence.kernels.kernel_fit` writes the files and prints which files changed.
A test compares the committed files with a refit.
"""

import sys
from pathlib import Path
from statistics import median

import msgspec
import yaml

from rematbench.evidence.kernels.kernel_curves import (
    fit_attention,
    fit_gemm,
    fit_half_waves,
    fit_operators,
    rounded,
)
from rematbench.evidence.kernels.kernel_rows import (
    KernelError,
    KernelRow,
    Match,
    Rows,
    ShareRows,
    Sources,
    evidence,
    load_sources,
    measured,
    read_kernel_rows,
    unclaimed,
)
from rematbench.inputs.kernel_rates import (
    OPERATORS,
    SOURCES,
    AttentionRates,
    Evidence,
    GenerationRates,
    Share,
)
from rematbench.inputs.paths import data_dir

HEADER = """# Written by `python -m rematbench.evidence.kernels.kernel_fit` from sources.yaml and
# results/published/kernels.csv: `fitted` names what was fitted to those rows, `source` says where
# the rest is from.  Outliers: rows further than 10 % off, by line of kernels.csv.
"""


def picked(sources: Sources, generation: str, match: Match, rows: Rows) -> list[KernelRow]:
    """The rows of a generation that match; KernelError if no row matches."""
    found = [r for r in rows if sources.of_generation(generation, r) and match.holds(r)]
    if not found:
        raise KernelError(f"kernels.csv: no {generation} row matches {msgspec.to_builtins(match)}")
    return found


# -- shares -----------------------------------------------------------------------------------


def link_rate(sources: Sources, row: KernelRow, of: str) -> float:
    """The bytes/s of the link or memory that a row's share refers to; 1 if `of` is `one`."""
    if of == "one":
        return 1.0
    if of in ("pcie", "nic"):
        return sources.links[row.shape[of]]
    rate: float = getattr(sources.gpus[row.gpu], f"{of}_bytes_per_s")
    return rate


def fit_share(sources: Sources, generation: str, declared: ShareRows, rows: Rows) -> Share:
    """The median of a share over its rows, or the declared value; KernelError if sources.yaml
    gives neither or no row matches."""
    if declared.match is None:
        if declared.value is None or not declared.source:
            raise KernelError(f"sources.yaml: a share of {generation} has neither rows nor value")
        return Share(value=declared.value, evidence=Evidence(source=declared.source))
    found = [
        r
        for r in rows
        if declared.match.holds(r)
        and (sources.of_generation(generation, r) or r.gpu not in sources.gpus)
    ]
    if not found:
        raise KernelError(f"kernels.csv: no row matches {msgspec.to_builtins(declared)}")
    base = 1.0
    if declared.against is not None:
        base = median(measured(r).value for r in rows if declared.against.holds(r))
    of = "one" if declared.of == "against" else declared.of
    shares = [measured(r).value / link_rate(sources, r, of) / base for r in found]
    value = rounded(median(shares))
    speeds = [share / value for share in shares]
    return Share(
        value=value, evidence=evidence(sources, found, speeds, ("value",), declared.source)
    )


# -- files ------------------------------------------------------------------------------------


def fit_generation(
    sources: Sources, name: str, rows: Rows, like: GenerationRates | None
) -> GenerationRates:
    """The content of the file of one GPU generation; `like`: the generation that `like` names."""
    facts = sources.generations[name]
    if like:
        why = Evidence(source=f"as {facts.like}'s. Ours")
        waves = {key: Share(value=one.value, evidence=why) for key, one in like.half_waves.items()}
    else:
        own = picked(sources, name, facts.waves or Match(), rows)
        waves = fit_half_waves(sources, own, facts.sm_count)
    attention: dict[str, AttentionRates] = {}
    for backend, part in facts.attention.items():
        own = picked(sources, name, part.match, rows)
        ratio = attention[part.like] if part.like else None
        lengths = like.attention[backend] if like else None
        attention[backend] = fit_attention(sources, own, waves, facts.sm_count, ratio, lengths)

    def shares(declared: dict[str, ShareRows]) -> dict[str, Share]:
        return {key: fit_share(sources, name, part, rows) for key, part in declared.items()}

    return GenerationRates(
        sm_count=facts.sm_count,
        source=facts.source,
        half_waves=waves,
        attention=attention,
        refused=facts.refused,
        unrated=facts.unrated,
        gemm=fit_gemm(sources, picked(sources, name, facts.gemm, rows), facts.sm_count),
        hbm=fit_share(sources, name, facts.hbm, rows),
        copies=shares(facts.copies),
        collectives=shares(facts.collectives),
        overlap=shares(facts.overlap),
    )


def refit(folder: Path, published: Path) -> dict[str, msgspec.Struct]:
    """The content of every file of config/kernels except sources.yaml, by name.  KernelError if
    a row is neither used nor excluded.  The result is deterministic."""
    sources = load_sources(folder / f"{SOURCES}.yaml")
    every = read_kernel_rows(published)
    if lost := unclaimed(sources, every):
        lines = ", ".join(str(row.line) for row in lost)
        raise KernelError(f"kernels.csv: lines {lines} are neither used nor excluded")
    rows = sources.used(every)
    found: dict[str, GenerationRates] = {}
    for name, part in sources.generations.items():
        if part.like and part.like not in found:
            raise KernelError(f"{SOURCES}.yaml: {name}: like: no earlier generation {part.like!r}")
        found[name] = fit_generation(sources, name, rows, found.get(part.like))
    hbm = {name: part.hbm.value for name, part in found.items()}
    gemms = {name: part.gemm for name, part in found.items()}
    return {**found, OPERATORS: fit_operators(sources, rows, hbm, gemms)}


def as_text(rates: msgspec.Struct) -> str:
    """The text of a file of config/kernels."""
    plain = msgspec.to_builtins(rates)
    return HEADER + yaml.safe_dump(plain, sort_keys=False, default_flow_style=None, width=100)


def main() -> None:
    """Refit and write the files; print which files changed."""
    folder = data_dir("config") / "kernels"
    for name, rates in refit(folder, data_dir("published") / "kernels.csv").items():
        path = folder / f"{name}.yaml"
        text = as_text(rates)
        same = path.exists() and path.read_text(encoding="utf-8") == text
        path.write_text(text, encoding="utf-8")
        sys.stdout.write(f"{path.name}: {'unchanged' if same else 'written'}\n")


if __name__ == "__main__":
    main()
