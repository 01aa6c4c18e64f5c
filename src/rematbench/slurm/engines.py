"""The engine of a cell: our executor runs a method, a package runs its own baseline."""

from collections.abc import Mapping
from pathlib import Path

from msgspec.structs import replace

from rematbench.packages.process import baselines, policy
from rematbench.plugins.registry import Composition, MethodError, Registry, Value
from rematbench.runs.digests import digest, method_digest
from rematbench.runs.suite import NamedProblem
from rematbench.slurm.shown import OURS
from rematbench.spec.configfile import closest
from rematbench.spec.paths import data_dir


def is_baseline(registry: Registry, name: str) -> bool:
    """Whether a name of a suite is a baseline's; a method of that name comes first."""
    return name not in registry.methods and name in baselines()


def engine_name(registry: Registry, name: str) -> str:
    """The engine of a name, without its version, which only a record has."""
    return name.replace("_", "-") if is_baseline(registry, name) else OURS


def resolve(registry: Registry, name: str, settings: Mapping[str, Value]) -> Composition:
    """A method, or else a baseline's policy; MethodError for a name that is neither."""
    if is_baseline(registry, name):
        return policy(name, settings)
    for part in name.split("+"):
        if is_baseline(registry, part):
            raise MethodError(f"{name!r}: {part} is a baseline, which composes with nothing")
        broken = any(Path(path).stem == part for path in registry.broken)
        if part not in registry.methods and ":" not in part and not broken:
            hint = closest(part, [*registry.methods, *baselines()])
            raise MethodError(
                f"unknown method or baseline {part!r}{hint} (methods: "
                f"{', '.join(registry.methods)}; baselines: {', '.join(baselines())})"
            )
    return registry.resolve(name, settings)


def on_own_stack(registry: Registry, name: str, spec: NamedProblem) -> NamedProblem:
    """The problem under its engine's system: a baseline has the system of its own name, if there
    is one; methods have the problem's `system`."""
    own = name.replace("_", "-")
    if is_baseline(registry, name) and (data_dir("config") / f"systems/{own}.yaml").is_file():
        return replace(spec, system=own)
    return spec


def code_of(registry: Registry, name: str) -> str:
    """A digest of a cell's files and of their imports: a composed method's, or a baseline's
    with the files that all baselines share and its pinned packages."""
    if not is_baseline(registry, name):
        return method_digest(registry.methods[part].origin for part in name.split("+"))
    folder = data_dir("baselines")
    files = [folder / "run.py", *folder.glob("common/*.py"), *folder.glob(f"{name}/*.py")]
    pins = list(folder.glob(f"{name}/requirements.txt"))
    return method_digest(str(path) for path in files) + digest(pins)
