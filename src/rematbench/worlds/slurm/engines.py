"""The engine of a cell: our executor runs a method, a package runs the baseline of its name."""

from collections.abc import Mapping
from pathlib import Path

from msgspec.structs import replace

from rematbench.plugins.registry import Composition, MethodError, Registry, Value
from rematbench.spec.configfile import closest
from rematbench.spec.paths import data_dir
from rematbench.worlds.packages.process import baselines, policy
from rematbench.worlds.records.digests import digest, method_digest
from rematbench.worlds.records.suite import NamedProblem
from rematbench.worlds.slurm.shown import OURS


def is_baseline(registry: Registry, name: str) -> bool:
    """Whether a name in a suite is a baseline's.  Where a method has the same name, it is not."""
    return name not in registry.methods and name in baselines()


def engine_name(registry: Registry, name: str) -> str:
    """The name of the engine that runs a method or baseline, without the version, which only a
    record has."""
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
    """The problem with its engine's system: for a baseline the system of the baseline's name, if
    there is one; for a method the problem's own `system`."""
    own = name.replace("_", "-")
    if is_baseline(registry, name) and (data_dir("config") / f"systems/{own}.yaml").is_file():
        return replace(spec, system=own)
    return spec


def code_of(registry: Registry, name: str) -> str:
    """A digest of the code behind a cell: the files of its methods, or of its baseline with the
    files that all baselines share and the pinned packages; and what these files import."""
    if not is_baseline(registry, name):
        return method_digest(registry.methods[part].origin for part in name.split("+"))
    folder, plan = data_dir("baselines"), Path(baselines()[name].origin)
    files = [folder / "run.py", *folder.glob("common/*.py"), *folder.glob(f"{name}/*.py")]
    files += plan.parent.glob("*.py")
    pins = list(folder.glob(f"{name}/requirements.txt"))
    return method_digest(str(path) for path in files) + digest(pins)
