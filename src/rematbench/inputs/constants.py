"""The constants of the cost formulas: per GPU generation, cluster network and stack.

Every number in config/calibration.yaml is `{value, source}`; `source: fitted` marks the scalars
that were fitted to published rows.  FITTED_BUDGET is the most fitted scalars that one GPU
generation, network or stack may have.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct, field
from msgspec.structs import replace

from rematbench.inputs.kernel_rates import KernelRates, load_kernel_rates
from rematbench.inputs.paths import data_dir

FITTED = "fitted"
FITTED_BUDGET = {"gpus": 4, "networks": 3, "systems": 2}
DEFAULT = "default"
LATER = ("ada",)
"""GPU generations that were added after the first records were written."""


class Number(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One constant and its source (`fitted`, or a citation)."""

    value: float
    source: str


class GpuConstants(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Hardware facts of one GPU generation, and the shares of its peak rates that kernels reach.

    `sm_count`, `tile_rows`, `tile_columns` are hardware facts.  Efficiencies are fractions of the
    dense peak or of the HBM rate.  `gemm_tail_waves` is the part of a wave of tiles that a GEMM
    loses at its end; `gemm_half_k` is the reduction depth at which a GEMM reaches half of its
    efficiency.  `withheld_bytes` is the device memory that the driver keeps, `context_bytes` that
    of a CUDA context, `workspace_bytes` that of a workspace of TransformerEngine's matrix products.
    `*_peak_share`: dense peak of matrix products in fp32, TF32 and fp64 over the peak in 16 bits
    (0: not declared).
    """

    sm_count: float
    tile_rows: float
    tile_columns: float
    gemm_efficiency: float
    gemm_tail_waves: float
    gemm_half_k: float
    hbm_efficiency: float
    withheld_bytes: float
    context_bytes: float
    workspace_bytes: float = 0.0
    fp32_peak_share: float = 0.0
    tf32_peak_share: float = 0.0
    fp64_peak_share: float = 0.0


class NetworkConstants(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Shares of the link rates that collectives reach inside a node and between nodes.

    `ring_nics` is the most NICs of a node that one ring uses.  `nvlink_mesh` is 1 if the GPUs of a
    node are linked pairwise, without a switch, so that a small group uses only the links between
    its members.  `kernel_scale` multiplies the seconds of all kernels, for GPUs that run below
    their generation's power limit.  `host_ranks` is the number of ranks of a tensor-parallel group
    that can issue kernels at the same time on a node's cores without slowing each other.
    """

    nvlink_efficiency: float
    nic_efficiency: float
    ring_nics: float
    nvlink_mesh: float
    kernel_scale: float
    host_ranks: float


class SystemConstants(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a stack differs from the generation's kernels.  `kernel_scale` multiplies the seconds of
    all kernels; `gap_s` is the device's idle time between two kernels; `host_launch_s` is the time
    that the host needs to issue a kernel.  An overlapped collective of s seconds makes compute
    longer by `tp_stall` x s (tensor and context parallelism) or `dp_stall` x s (data
    parallelism)."""

    kernel_scale: float
    gap_s: float
    host_launch_s: float
    tp_stall: float
    dp_stall: float


class CommonConstants(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Constants of libraries and host links, the same on every cluster; seconds and fractions.

    Tuples have an entry for each NCCL protocol (LL128, Simple): base latency, latency of a hop
    inside a node and between nodes, and share of the link rate.  `communicator_*_bytes`: device
    memory of one NCCL communicator inside a node, or between nodes.  `grouped_gemm_s`: the least
    seconds of each GEMM of a grouped GEMM, which the host issues in a loop.  `expert_pace`: seconds
    of a launch of a mixture of experts over `host_launch_s`; it is above 1 because the packages run
    Python code between launches.  `graph_bytes_share`: bytes that a layer's CUDA graph holds beside
    the layer's kept activations, as a share of these.  `host_system_share`: the share of a node's
    host memory that the system and the training processes take.  With an optimizer in host memory
    they take `host_other_bytes`, but at most `host_other_share` of a node.  `host_beside_share`,
    `visit_delay_share`: how concurrent copies slow an optimizer on the host (costs/bind.py,
    `host_update_beside_s`).
    """

    nccl_base_s: tuple[float, ...]
    nccl_nvlink_hop_s: tuple[float, ...]
    nccl_network_hop_s: tuple[float, ...]
    nccl_bandwidth_share: tuple[float, ...]
    pcie_efficiency: float
    copy_latency_s: float
    optimizer_extra_bytes: float
    grouped_gemm_s: float = 0.0
    expert_pace: float = 1.0
    communicator_node_bytes: float
    communicator_network_bytes: float
    graph_bytes_share: float
    host_system_share: float
    dram_efficiency: float
    host_other_bytes: float = 0.0
    host_other_share: float = 0.0
    host_beside_share: float = 1.0
    visit_delay_share: float = 0.0


class FitRule(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A rule that selects a whole sweep of published rows for the fit: rows that match all fields
    that the rule sets.  `source` and `table` match as substrings."""

    source: str
    why: str = ""
    table: str = ""
    system: tuple[str, ...] = ()
    cluster: tuple[str, ...] = ()
    model: tuple[str, ...] = ()
    layers: tuple[int, ...] = ()
    gpus: tuple[int, ...] = ()
    micro_batch: tuple[int, ...] = ()
    tp: tuple[int, ...] = ()
    cp: tuple[int, ...] = ()
    pp: tuple[int, ...] = ()
    precision: tuple[str, ...] = ()

    def matches(self, row: Mapping[str, Any]) -> bool:
        """Whether a row belongs to the sweep; the decision reads only the job, never a result."""
        return (
            self.source in row["source"]
            and self.table in row.get("table", "")
            and all(_is_among(row.get(key, ""), getattr(self, key)) for key in JOB_COLUMNS)
        )


JOB_COLUMNS = {*FitRule.__struct_fields__} - {"source", "why", "table"}
"""Columns of a published row that a rule may restrict to some values."""


def _is_among(value: Any, allowed: tuple[Any, ...]) -> bool:
    if allowed and isinstance(allowed[0], int):
        return value not in ("", None) and int(float(value)) in allowed
    return not allowed or value in allowed


def is_fit(row: Mapping[str, Any], rules: Iterable[FitRule]) -> bool:
    """Whether any rule selects the row."""
    return any(rule.matches(row) for rule in rules)


class ShapedBy(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A source whose test rows were seen before a formula or rule was changed (`in-sample`)."""

    source: str
    mechanism: str


class Calibration(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The contents of config/calibration.yaml as plain numbers, and the rates of config/kernels.
    `fitted` names the constants that were fitted to whole steps, as `section.entry.field`;
    `fit_experts` declares the rows to which `common.expert_pace` is fitted."""

    gpus: dict[str, GpuConstants]
    networks: dict[str, NetworkConstants]
    systems: dict[str, SystemConstants]
    common: CommonConstants
    kernels: KernelRates
    fitted: tuple[str, ...] = ()
    fit: tuple[FitRule, ...] = ()
    fit_experts: tuple[FitRule, ...] = ()
    shaped_by: tuple[ShapedBy, ...] = ()
    date: str = ""

    def gpu(self, generation: str) -> GpuConstants:
        """Constants of a GPU generation; KeyError for an unknown generation."""
        if generation not in self.gpus:
            known = ", ".join(sorted(self.gpus))
            raise KeyError(f"no calibration for GPU generation {generation!r} (known: {known})")
        return self.gpus[generation]

    def has_rates(self, generation: str) -> bool:
        """Whether there are kernel rates for a GPU generation."""
        return generation in self.gpus and generation in self.kernels.generations

    def hashed_for(self, generation: str) -> "Calibration":
        """The part that a run's hash covers: generations of LATER only for their own runs, so that
        the hashes of other runs stay."""
        gpus, rates = dict(self.gpus), dict(self.kernels.generations)
        for name in set(LATER) - {generation}:
            gpus.pop(name, None)
            rates.pop(name, None)
        return replace(self, gpus=gpus, kernels=replace(self.kernels, generations=rates))

    def gpu_bytes(self, generation: str) -> GpuConstants:
        """The constants from which device bytes of a GPU generation follow. For a generation
        without constants, each field has its largest value among all generations."""
        if generation in self.gpus:
            return self.gpus[generation]
        known, names = self.gpus.values(), GpuConstants.__struct_fields__
        return GpuConstants(**{name: max(getattr(gpu, name) for gpu in known) for name in names})

    def network_entry(self, names: Sequence[str]) -> str:
        """The first of a cluster's entries (Cluster.constants) that exists, or `default`."""
        return next((name for name in names if name in self.networks), DEFAULT)

    def system_entry(self, names: Sequence[str]) -> str:
        """The first of a stack's entries (System.constants) that exists, or `default`."""
        return next((name for name in names if name in self.systems), DEFAULT)


def load_calibration(path: Path) -> Calibration:
    """The constants of a calibration file with the shipped kernel rates; an unknown key or a number
    without a source is an error."""
    return parse_calibration(path.read_bytes())


@cache
def shipped_kernels() -> KernelRates:
    """The rates of config/kernels; each process reads them once."""
    return load_kernel_rates(data_dir("config") / "kernels")


class _File(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """config/calibration.yaml as it is written, each number with its source."""

    date: str
    gpus: dict[str, dict[str, Number]]
    networks: dict[str, dict[str, Number]]
    systems: dict[str, dict[str, Number]]
    common: dict[str, Any]
    fit: tuple[FitRule, ...]
    fit_experts: tuple[FitRule, ...] = ()
    shaped_by: tuple[ShapedBy, ...] = field(default=())


def parse_calibration(text: bytes) -> Calibration:
    """The calibration in YAML text; ValueError if more scalars than FITTED_BUDGET are fitted."""
    raw = msgspec.yaml.decode(text, type=_File)
    fitted: list[str] = []
    plain: dict[str, Any] = {}
    for section, budget in FITTED_BUDGET.items():
        entries: dict[str, dict[str, Number]] = getattr(raw, section)
        plain[section] = {
            name: {key: number.value for key, number in numbers.items()}
            for name, numbers in entries.items()
        }
        for name, numbers in entries.items():
            keys = [key for key, number in numbers.items() if number.source == FITTED]
            if len(keys) > budget:
                raise ValueError(f"calibration: {section}.{name} fits more than {budget} constants")
            fitted += [f"{section}.{name}.{key}" for key in keys]
        if section != "gpus" and DEFAULT not in entries:
            raise ValueError(f"calibration: {section} needs a `{DEFAULT}` entry")
    plain["common"] = {key: number["value"] for key, number in raw.common.items()}
    plain |= {key: getattr(raw, key) for key in ("fit", "fit_experts", "shaped_by", "date")}
    plain |= {"kernels": shipped_kernels(), "fitted": fitted}
    return msgspec.convert(plain, type=Calibration, strict=False)


_LINE = re.compile(r"^(?P<indent> *)(?P<key>[\w.-]+):(?P<rest>.*)$")
_VALUE = re.compile(r"value: *[^,}]+")


def updated_text(text: str, calibration: Calibration) -> str:
    """The YAML text with the fitted values of `calibration`; other text stays as it is."""
    path: list[str] = []
    lines = []
    for line in text.splitlines():
        match = _LINE.match(line)
        if match is None:
            lines.append(line)
            continue
        path = [*path[: len(match["indent"]) // 2], match["key"]]
        if len(path) == 3 and ".".join(path) in calibration.fitted:
            section, entry, key = path
            value = getattr(getattr(calibration, section)[entry], key)
            lines.append(_VALUE.sub(f"value: {_digits(value)}", line, count=1))
        else:
            lines.append(line)
    return "\n".join(lines) + "\n"


def _digits(value: float) -> str:
    """A number with four significant digits, and with the decimal point that YAML 1.1 requires
    before an exponent."""
    text = f"{value:.4g}"
    return text.replace("e", ".0e") if "e" in text and "." not in text else text
