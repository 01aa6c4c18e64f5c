"""The Python interface: what `import rematbench` offers, with the checks of the command line.

Every wrong input raises a ValueError whose text is one line: what is wrong, where, and what is
allowed.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

import pandas as pd
from msgspec import Struct

from rematbench.advise.compare.candidates import load_compare
from rematbench.advise.compare.compare import Comparing
from rematbench.advise.compare.judged import Order, judge, lines, run_band
from rematbench.advise.search.answer import judged, line
from rematbench.advise.search.halves import rounds
from rematbench.advise.search.job import Asked, SearchJob
from rematbench.advise.search.space import Fixed
from rematbench.evaluate.evaluation import PlanEvaluation
from rematbench.evaluate.job import Job
from rematbench.evaluate.outcome import Outcome, make_problem, run_method
from rematbench.evidence.bands import Band, leaving_reserve
from rematbench.plugins.discover import discover, entry_of
from rematbench.plugins.registry import Composition, Method, MethodError, Value, build
from rematbench.spec.configfile import ConfigError, convert
from rematbench.spec.problemspec import ProblemSpec
from rematbench.worlds.packages.flags import Engines

Problem = ProblemSpec
"""A planning problem, in the words of the command line: `Problem(model="llama-7b", gpus=8, ...)`.
`model`, `cluster` and `system` are names or paths of files; parallel degrees and batches are whole
numbers."""


class Run(Struct, frozen=True, kw_only=True):
    """The result of one method simulated on one problem.  Out of memory and unsupported are
    results, not errors: `status` is ok, oom, unsupported or failed, and `reason` explains it.
    Numbers are None where the method made no plan."""

    method: str
    family: str
    job: Job
    outcome: Outcome

    def __repr__(self) -> str:
        """A short line for notebooks: the fields of the problem and the plan would fill pages."""
        names = ("status", "reason", "step_s", "tokens_per_s_per_gpu", "headroom_bytes")
        told = ", ".join(f"{name}={getattr(self, name)!r}" for name in names)
        return f"Run(method={self.method!r}, {told})"

    @property
    def status(self) -> str:
        """The outcome in one word: ok, oom, unsupported or failed."""
        return self.outcome.status

    @property
    def reason(self) -> str:
        """Which memory is too small or what the method refused; empty if the plan fits."""
        return self.outcome.reason

    @property
    def fits(self) -> bool:
        """Whether the plan fits device and host memory."""
        return self.outcome.status == "ok"

    @property
    def headroom_bytes(self) -> int | None:
        """Usable minus needed bytes of the fullest device; negative where the plan does not fit."""
        return self.outcome.verdict.headroom_bytes if self.outcome.verdict else None

    @property
    def step_s(self) -> float | None:
        """Seconds of one optimizer step; where the plan does not fit, the seconds it would take."""
        return self.evaluation.step_s if self.evaluation else None

    @property
    def tokens_per_s_per_gpu(self) -> float | None:
        """Training tokens per second and GPU."""
        return self.evaluation.tokens_per_s_per_gpu if self.evaluation else None

    @property
    def band(self) -> tuple[float, float] | None:
        """(low, high) tokens per second and GPU: 80 % of such predictions lie between the two."""
        speed = self.tokens_per_s_per_gpu
        return (self._band.low(speed), self._band.high(speed)) if speed else None

    @property
    def outside(self) -> tuple[str, ...]:
        """The properties of this run that lie outside the range of the published rows, in words."""
        return tuple(self._band.outside.values())

    @property
    def _band(self) -> Band:
        return run_band(self.job.problem, self.family, self.outcome.plan, self.job.base)

    @property
    def evaluation(self) -> PlanEvaluation | None:
        """All numbers of the plan: MFUs, bytes of each rank, recomputed FLOP."""
        return self.outcome.evaluation

    @property
    def command(self) -> str:
        """The shell command of this run; empty where a model or cluster was given as an object."""
        return self.job.run_with(self.method)

    def stages(self) -> pd.DataFrame:
        """A table of bytes: one row for each pipeline rank, one column for each kind of memory."""
        ranks = self.evaluation.ranks if self.evaluation else ()
        names = ("parameter", "gradient", "optimizer", "activation_peak", "pools")
        peaks = ("device_peak", "host_peak")
        rows = [{f"{n}_bytes": getattr(rank, n) for n in (*names, *peaks)} for rank in ranks]
        return pd.DataFrame(rows, columns=[f"{n}_bytes" for n in (*names, *peaks)])


def load_method(
    text: str | Path,
    folder: str | Path | None = None,
    *,
    problem: ProblemSpec | None = None,
    **settings: Value,
) -> Composition:
    """The method that a text names, with its parameters.  The text is what `simulate` takes: a name
    (`memo:alpha=0.3+mst`), a row's name of `compare`, or the path of a method file (`mine.py`).

    Names are also looked up in `folder`.  `settings` are parameters, as `--set` gives them.  With a
    `problem`, operators of a policy that its stack lacks are left out, as on the command line.
    Raises MethodError for an unknown method or a wrong parameter.
    """
    if str(text).endswith(".py"):
        return Composition((build(entry_of(Path(text)), settings),))
    registry = discover([Path(folder)] if folder else ())
    return registry.resolve(str(text), settings, _job(problem).problem if problem else None)


def simulate(
    problem: ProblemSpec, method: str | Composition | Method, *, checked: bool = False
) -> Run:
    """Simulate a method (a name, a result of `load_method`, or an object with `plan`) on a problem.
    `checked` also proves the lowered plan safe (evaluate/proof.py).

    Raises ConfigError, LayoutError, RateError or MethodError, all ValueErrors, for a wrong input.
    """
    job = _job(problem)
    if isinstance(method, str):
        found, named = discover().resolve(method, None, job.problem), method
    elif not isinstance(method, Composition) and not callable(getattr(method, "plan", None)):
        raise MethodError(f"expected a method's name or an object with plan, not {method!r}")
    else:
        found = method if isinstance(method, Composition) else Composition((method,))
        named = found.text
    outcome = run_method(job.problem, found, job.base, checked=checked)
    return Run(method=named, family=found.name, job=job, outcome=outcome)


def compare(
    problem: ProblemSpec,
    *,
    also: Sequence[str] = (),
    only: Sequence[str] = (),
    folders: Sequence[str | Path] = (),
    tokens: float = 0.0,
    price: float = 0.0,
    limit_s: int = 4,
    processes: int = 2,
) -> pd.DataFrame:
    """Every method, composition and baseline policy on one problem, best first, with the columns of
    the CSV file of `rematbench compare` (base SI units, fractions; missing values where there is
    none).

    `also` adds methods by name; `only` keeps just the named ones; `folders` hold further method
    files; `tokens` (to train on) and `price` (of a GPU-hour) add columns of days and cost.  Each
    method may take `limit_s` CPU seconds.
    """
    _check_lists(also=also, only=only, folders=folders)
    _check_counts(limit_s=limit_s, processes=processes)
    order = Order(tokens=tokens, price=price)
    config, job = load_compare(), _job(problem)
    comparing = Comparing(
        job.problem,
        job.base,
        config,
        methods=[Path(folder) for folder in folders],
        also=also,
        only=only,
        processes=processes,
        limit_s=limit_s,
    )
    items = judge(comparing.everything(), job.problem)
    return pd.DataFrame(lines(items, job, Engines(job.problem), order))


def search(
    problem: ProblemSpec,
    *,
    fixed: Mapping[str, int] | None = None,
    methods: Sequence[str] = (),
    folders: Sequence[str | Path] = (),
    within: float = 0.005,
    top: int = 10,
    processes: int = 2,
) -> pd.DataFrame:
    """The fastest layouts and plans of a problem, best first, with the columns of the CSV file of
    `rematbench search`; `attrs["gap"]` is the share of the first row's step time by which another
    plan may be shorter.

    The degrees of `problem` itself are ignored: the degrees in `fixed` (tp, cp, ulysses, pp, vpp,
    micro_batch, zero_stage) are held, all others are searched.  `methods` restricts the search to
    the named methods and their compositions.
    """
    if not isinstance(problem, ProblemSpec):
        raise ConfigError("", "problem", f"expected a rematbench.Problem, not {problem!r}")
    _check_lists(methods=methods, folders=folders)
    _check_counts(top=top, processes=processes)
    if not (isinstance(within, int | float) and 0 <= within < 1):
        raise ConfigError("", "within", f"expected a share from 0 to below 1, not {within!r}")
    if not isinstance(fixed, Mapping | None):
        raise ConfigError("", "fixed", f"expected degrees by name, not {fixed!r}")
    asked = Asked(
        spec=problem,
        fixed=convert(dict(fixed or {}), Fixed, "fixed"),
        only=tuple(methods),
        folders=tuple(Path(folder) for folder in folders),
        within=within,
    )
    job = SearchJob(asked).ready()
    *_, end = rounds(asked, shown=top, processes=processes)
    found = judged(job, end.found[:top])
    table = pd.DataFrame([line(place, one) for place, one in enumerate(found, 1)])
    table.attrs["gap"] = end.gap
    return table


def _check_lists(**given: object) -> None:
    for name, names in given.items():
        if isinstance(names, str) or not isinstance(names, Sequence):
            raise ConfigError("", name, f"expected a list of names, not {names!r}")


def _check_counts(**given: object) -> None:
    for name, value in given.items():
        if type(value) is not int or value < 1:
            raise ConfigError("", name, f"expected a whole number above 0, not {value!r}")


def _job(problem: ProblemSpec) -> Job:
    """The job of a problem; ConfigError for an argument that is no Problem."""
    if not isinstance(problem, ProblemSpec):
        raise ConfigError("", "problem", f"expected a rematbench.Problem, not {problem!r}")
    made = leaving_reserve(make_problem(problem))
    try:
        words = tuple(problem.to_arguments())
    except ConfigError:  # a model, cluster or system given as an object has no name to type
        words = ()
    return Job(problem=made, base=made.base_plan, words=words)


__all__ = ["MethodError", "Problem", "Run", "compare", "load_method", "search", "simulate"]
