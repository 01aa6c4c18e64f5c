"""A campaign suite: its cells, the engine and key of each cell, and the bundles of cells that share
an allocation. Too many nodes or too many predicted GPU-hours are refused before the first
submission.

Our executor runs methods; a baseline runs in the package of the same name.
"""

from collections.abc import Collection, Mapping
from functools import cached_property
from math import fsum
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

from rematbench.evaluate.evaluation import PlanEvaluation
from rematbench.host.console import CommandError
from rematbench.host.table import grouped
from rematbench.inputs.configfile import ConfigError, closest
from rematbench.inputs.paths import data_dir
from rematbench.plan import PlanError, Unsupported
from rematbench.plugins.registry import IDENTITY, Composition, MethodError, Registry, Value
from rematbench.problem import Problem
from rematbench.workload import PositiveInt
from rematbench.worlds.packages.process import baselines, policy
from rematbench.worlds.packages.stack import package_problem
from rematbench.worlds.records.digests import code_digest, digest, method_digest
from rematbench.worlds.records.measured import TIMED_STEPS
from rematbench.worlds.records.record import content_hash, run_spec
from rematbench.worlds.records.store import Store
from rematbench.worlds.records.suite import NamedProblem, Suite, Variant, read_suite
from rematbench.worlds.slurm.settings import Center, load_center

OURS = "rematbench"

OVERHEAD_MINUTES = 5
"""Minutes of an allocation's time limit for imports from a file system whose cache is empty."""

STARTUP_S = 60.0
"""Seconds of a cell's start-up (imports, communicators, allocating the model): our estimate."""


class CampaignSuite(Suite, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Problems and methods to execute, with `steps` observed optimizer steps per cell.

    `methods`: names to run on every problem (empty: all discovered methods).  Methods and variants
    may name baselines, which on GPUs take `warmup` more steps before the timed steps.
    `cell_minutes` is the time limit of a cell.  `cells_per_job` is the largest number of cells that
    share an allocation (docs/slurm.md).
    """

    methods: tuple[str, ...] = ()
    steps: PositiveInt = 3
    warmup: PositiveInt = 2
    cell_minutes: PositiveInt = 10
    cells_per_job: PositiveInt = 16


class CampaignCell(Struct, frozen=True, kw_only=True):
    spec: NamedProblem
    variant: Variant
    number: int

    @property
    def name(self) -> str:
        """PROBLEM.METHOD.NUMBER, unique in its suite."""
        return f"{self.spec.name}.{self.variant.method}.{self.number}"


class Bundle(Struct, frozen=True, kw_only=True):
    """Cells that share an allocation: one method, one number of nodes."""

    name: str
    nodes: int
    gpus_per_node: int
    minutes: int
    cells: tuple[CampaignCell, ...]


class Campaign:
    def __init__(self, suite: CampaignSuite, registry: Registry, cluster: str | Path = "") -> None:
        """`cluster` (a name or file) replaces the cluster of the suite's problems.  ConfigError if
        the problems name several clusters or the cluster has no `slurm:` section."""
        if cluster:
            changed = tuple(replace(spec, cluster=str(cluster)) for spec in suite.problems)
            suite = replace(suite, problems=changed)
        names = sorted({spec.cluster for spec in suite.problems})
        if len(names) != 1:
            text = f"all problems of a suite must use the same cluster (found: {', '.join(names)})"
            raise ConfigError("", "problems", text)
        self.suite = suite
        self.registry = registry
        self.center: Center = load_center(names[0])
        self._problems: dict[tuple[str, str], Problem] = {}

    @cached_property
    def cells(self) -> tuple[CampaignCell, ...]:
        """Every cell, ordered by method and then by problem."""
        names = self.suite.methods or tuple(self.registry.methods)
        every = (*(Variant(method=name) for name in names), *self.suite.variants)
        variants = grouped((variant.method, variant) for variant in every)
        for method in variants:
            resolve(self.registry, method, {})  # it raises MethodError for an unknown name
        return tuple(
            CampaignCell(spec=self._on_stack(method, spec), variant=variant, number=number)
            for method, of_method in variants.items()
            for spec in self.suite.problems
            for number, variant in enumerate(of_method)
            if not variant.problems or spec.name in variant.problems
        )

    def _on_stack(self, name: str, spec: NamedProblem) -> NamedProblem:
        """The problem with the system of its engine: for a baseline, the system whose file has the
        baseline's name, if it exists; for a method, the problem's `system`."""
        system = name.replace("_", "-")
        there = (data_dir("config") / f"systems/{system}.yaml").is_file()
        return replace(spec, system=system) if there and is_baseline(self.registry, name) else spec

    @cached_property
    def bundles(self) -> dict[str, Bundle]:
        """Bundles by name, METHOD.NODESxGPUS.PART. Each method has its own bundles, so a new method
        moves no cell of another method."""
        groups: dict[tuple[str, int, int], list[CampaignCell]] = {}
        for cell in self.cells:
            nodes = self.center.nodes(cell.spec.gpus)
            shape = (cell.variant.method, nodes, cell.spec.gpus // nodes)
            groups.setdefault(shape, []).append(cell)
        size = self._cells_per_job()
        found = {}
        for (method, nodes, gpus), cells in groups.items():
            for part, start in enumerate(range(0, len(cells), size)):
                chunk = tuple(cells[start : start + size])
                name = f"{method}.{nodes}x{gpus}.{part}"
                found[name] = Bundle(
                    name=name,
                    nodes=nodes,
                    gpus_per_node=gpus,
                    minutes=OVERHEAD_MINUTES + len(chunk) * self.suite.cell_minutes,
                    cells=chunk,
                )
        return found

    def _cells_per_job(self) -> int:
        """The most cells per job that the suite and the center's time limit allow. ConfigError if
        the time limit is too short for one cell."""
        suite, limit = self.suite, self.center.slurm.minutes
        room = (limit - OVERHEAD_MINUTES) // suite.cell_minutes
        if room < 1:
            text = (
                f"cell_minutes {suite.cell_minutes} plus {OVERHEAD_MINUTES} minutes of start-up "
                f"exceed the {limit} minutes that {self.center.name} allows for a job"
            )
            raise ConfigError("", "cell_minutes", text)
        return min(suite.cells_per_job, room)

    def bundle(self, name: str) -> Bundle:
        """A bundle by name; ConfigError with a hint if there is no such bundle."""
        if name not in self.bundles:
            hint = closest(name, self.bundles)
            known = ", ".join(self.bundles)
            raise ConfigError("", "bundle", f"unknown bundle {name!r}{hint} (known: {known})")
        return self.bundles[name]

    def problem(self, spec: NamedProblem) -> Problem:
        """The planning problem of a cell's spec, built once per name and system."""
        key = (spec.name, spec.system)
        if key not in self._problems:
            self._problems[key] = spec.problem()
        return self._problems[key]

    def method(self, cell: CampaignCell) -> Composition:
        """The method of a cell, or the policy of its baseline, with the variant's settings."""
        settings: dict[str, Value] = dict(cell.variant.settings)
        return resolve(self.registry, cell.variant.method, settings)

    def is_baseline(self, cell: CampaignCell) -> bool:
        return is_baseline(self.registry, cell.variant.method)

    def keeps_all(self, cell: CampaignCell, simulated: PlanEvaluation) -> bool:
        """Whether a cell keeps all activations: a cell of keep_all, or a cell of a baseline whose
        simulated step recomputes and offloads nothing."""
        if not self.is_baseline(cell):
            return cell.variant.method == IDENTITY
        return not simulated.recompute_flop and not simulated.offload_bytes

    def engine(self, cell: CampaignCell) -> str:
        """The name of the engine that runs a cell, without the version that records have."""
        return cell.variant.method.replace("_", "-") if self.is_baseline(cell) else OURS

    def steps(self, cell: CampaignCell) -> int:
        warmup = self.suite.warmup if self.is_baseline(cell) else 0
        return self.suite.steps + warmup + TIMED_STEPS

    def words(self, cell: CampaignCell) -> list[str]:
        words = [*cell.variant.to_arguments(cell.spec), "--steps", str(self.suite.steps)]
        if self.is_baseline(cell):
            return ["baseline", "run", *words, "--warmup", str(self.suite.warmup)]
        return ["execute", *words]

    def simulated(self, cell: CampaignCell) -> PlanEvaluation | None:
        """The simulated step of a cell; for a baseline, with the tensors that its package holds.
        None without a plan that can be lowered (the cell's row has the reason)."""
        problem, method = self.problem(cell.spec), self.method(cell)
        try:
            if self.is_baseline(cell):
                problem = package_problem(method, problem)
            plan = method.plan(problem)
            if isinstance(plan, Unsupported):
                return None
            found = problem.cost.evaluate(plan)
        except PlanError:
            return None
        assert isinstance(found, PlanEvaluation)  # the evaluator of make_problem
        return found

    def key(self, cell: CampaignCell) -> str:
        """The key of a cell's record: the cell's name and a hash of its request, its method and the
        code that can change its numbers."""
        asked = run_spec(self.problem(cell.spec), self.method(cell), "executed")
        name, steps = cell.variant.method, self.suite.steps
        if self.is_baseline(cell):
            word = content_hash([asked, steps, self.suite.warmup, baseline_digest(name)])
        else:
            own = method_digest(self.registry.methods[part].origin for part in name.split("+"))
            word = content_hash([asked, steps, [code_digest("executed"), own]])
        return f"{cell.name}.{word}"


def is_baseline(registry: Registry, name: str) -> bool:
    """Whether a name in a suite means a baseline; a method with the same name takes precedence."""
    return name not in registry.methods and name in baselines()


def resolve(registry: Registry, name: str, settings: Mapping[str, Value]) -> Composition:
    """The method with this name, otherwise the baseline's policy; MethodError for an unknown name
    or a combination with a baseline."""
    if is_baseline(registry, name):
        return policy(name, settings)
    for part in name.split("+"):
        if is_baseline(registry, part):
            raise MethodError(
                f"{name!r}: {part} is a baseline and cannot be combined with another method"
            )
        broken = any(Path(path).stem == part for path in registry.broken)
        if part not in registry.methods and ":" not in part and not broken:
            hint = closest(part, [*registry.methods, *baselines()])
            raise MethodError(
                f"unknown method or baseline {part!r}{hint} (methods: "
                f"{', '.join(registry.methods)}; baselines: {', '.join(baselines())})"
            )
    return registry.resolve(name, settings)


def baseline_digest(name: str) -> str:
    """A digest of the code behind a baseline: its files, the files that all baselines share, the
    imports of these files, and the pinned packages."""
    folder, plan = data_dir("baselines"), Path(baselines()[name].origin)
    files = [folder / "run.py", *folder.glob("common/*.py"), *folder.glob(f"{name}/*.py")]
    files += plan.parent.glob("*.py")
    return method_digest(map(str, files)) + digest(folder.glob(f"{name}/requirements.txt"))


def load_campaign_suite(path: Path) -> CampaignSuite:
    """A campaign suite from YAML; ConfigError, with the path, for an unknown key, a wrong type, no
    problem, or a problem name with a dot or a slash."""
    suite = read_suite(path, CampaignSuite)
    if not suite.problems:
        raise ConfigError(str(path), "problems", "the suite lists no problem")
    for name in (problem.name for problem in suite.problems):
        if "." in name or "/" in name:
            text = f"the problem name {name!r} must not contain a dot or a slash"
            raise ConfigError(str(path), "problems", text)
    return suite


def refuse(campaign: Campaign, store: Store, *, max_gpu_hours: float = 0.0) -> None:
    """Raise CommandError if a bundle with an unfinished cell needs more nodes than the center
    allows, or if all such bundles together exceed `max_gpu_hours` predicted GPU-hours (0: no
    limit)."""
    center, hours = campaign.center, {}
    for name, bundle in campaign.bundles.items():
        cells = [cell for cell in bundle.cells if store.read(campaign.key(cell)) is None]
        if not cells:
            continue
        if bundle.nodes > center.slurm.nodes:
            raise CommandError(
                f"{name} needs {bundle.nodes} nodes, but {center.name} allows "
                f"{center.slurm.nodes} (key slurm: nodes)"
            )
        hours[name] = gpu_hours(campaign, bundle, cells) if max_gpu_hours else 0.0
    total = fsum(hours.values())
    if total > max_gpu_hours:
        worst = max(hours, key=lambda name: hours[name])
        raise CommandError(
            f"{total:.3f} predicted GPU-hours exceed max_gpu_hours {max_gpu_hours:g} "
            f"({len(hours)} submissions, the largest {worst} with {hours[worst]:.3f})"
        )


def gpu_hours(campaign: Campaign, bundle: Bundle, cells: Collection[CampaignCell]) -> float:
    """Predicted GPU-hours of a bundle's cells; 0 on a cluster whose `slurm:` section has no `gres`.
    A job with whole nodes (`--exclusive`) counts all GPUs of its nodes."""
    slurm, cluster = campaign.center.slurm, campaign.center.cluster
    if not slurm.gres:
        return 0.0
    whole = "--exclusive" in slurm.extra
    gpus = bundle.nodes * (cluster.gpus_per_node if whole else bundle.gpus_per_node)
    seconds = STARTUP_S * len(cells)
    for cell in cells:
        step = campaign.simulated(cell)
        seconds += campaign.steps(cell) * step.step_s if step is not None else 0.0
    return gpus * seconds / 3600
