"""The Python interface of `import rematbench`, with the checks of the command line.

Every wrong input raises a ValueError with a message of one line: what is wrong, where, and what is
allowed.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rematbench.advise.candidates.candidate import load_compare
from rematbench.advise.candidates.layouts import Fixed
from rematbench.advise.compare.comparison import Comparison, table
from rematbench.advise.compare.estimate import Estimate, estimate_job, job_of, planned
from rematbench.advise.search.job import search_row
from rematbench.advise.search.request import SearchRequest
from rematbench.advise.search.rounds import SearchJob, rounds
from rematbench.evaluate.result import PlannedJob, Result, evaluate_method, told_fragmented
from rematbench.evidence.bands import with_host_rates
from rematbench.inputs.configfile import ConfigError, convert
from rematbench.inputs.job import Job
from rematbench.plugins.discover import discover, entry_of
from rematbench.plugins.registry import IDENTITY, Composition, Method, MethodError, Value, build

if TYPE_CHECKING:
    import pandas as pd

Problem = Job
"""A job with the facts of the command line's options: `Problem(model="llama-7b", gpus=8, ...)`.
`model`, `cluster` and `system` are names or paths of files; parallel degrees and batch sizes are
whole numbers."""


def load_method(
    text: str | Path,
    folder: str | Path | None = None,
    *,
    problem: Job | None = None,
    **settings: Value,
) -> Composition:
    """The method that a text names, with its parameters, as for the command `simulate`: a name
    (`memo:alpha=0.3+mst`), the name of a row of `compare`, or the path of a method file
    (`mine.py`).

    Names are also looked up in `folder`.  `settings` are parameters, as `--set` gives them.  With a
    `problem`, a policy leaves out the operators that the problem's stack lacks.
    Raises MethodError for an unknown method or a wrong parameter.
    """
    if str(text).endswith(".py"):
        return Composition((build(entry_of(Path(text)), settings),))
    registry = discover([Path(folder)] if folder else ())
    return registry.resolve(str(text), settings, _job(problem).problem if problem else None)


def simulate(problem: Job, method: str | Composition | Method, *, checked: bool = False) -> Result:
    """Simulate a method (a name, a result of `load_method`, or an object with `plan`) on a problem.
    `checked` also proves the order of the plan's actions safe (evaluate/proof.py).

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
    result = evaluate_method(
        job.problem, found, job.base, checked=checked, words=job.words, text=named
    )
    return with_host_rates(told_fragmented(result))


def estimate(model: str | Path, *, method: str = IDENTITY, **facts: Any) -> Estimate:
    """Whether a job fits: the verdict with its margin, bytes by rank and kind, the reason, and
    changes that would make it fit; `print` shows the answer.  `model`: a name, a config.json or a
    file; `facts`: keyword arguments of Problem, by default one GPU and as many micro-batches as the
    pipeline has stages.

    Raises ConfigError, LayoutError, RateError or MethodError, all ValueErrors, for a wrong input.
    """
    return estimate_job(job_of(str(model), facts), method, discover())


def compare(
    problem: Job,
    *,
    also: Sequence[str] = (),
    only: Sequence[str] = (),
    folders: Sequence[str | Path] = (),
    limit_s: int = 4,
    processes: int = 2,
) -> "pd.DataFrame":
    """Every method, composition and baseline policy on one problem, best first, with the columns of
    the CSV file of `rematbench compare` (base SI units and fractions; unknown values are missing).

    `also` adds methods by name; `only` restricts the rows to the named methods; `folders` contain
    further method files.  Planning a method may take `limit_s` CPU seconds.
    """
    _check_lists(also=also, only=only, folders=folders)
    _check_counts(limit_s=limit_s, processes=processes)
    comparison = Comparison(
        _job(problem),
        load_compare(),
        methods=[Path(folder) for folder in folders],
        also=also,
        only=only,
        processes=processes,
        limit_s=limit_s,
    )
    return _frame(table(comparison.everything()))


def search(
    problem: Job,
    *,
    fixed: Mapping[str, int] | None = None,
    methods: Sequence[str] = (),
    folders: Sequence[str | Path] = (),
    within: float = 0.02,
    top: int = 10,
    processes: int = 2,
) -> "pd.DataFrame":
    """The fastest layouts and plans of a problem, best first, with the columns of the CSV file of
    `rematbench search`. No plan of the space has a step that is shorter than that of the first row
    by more than the share `attrs["gap"]`.

    The search ignores the degrees of `problem`, holds those in `fixed` (tp, sp, cp, ulysses, pp,
    vpp, micro_batch, zero_stage) and tries all values of the others. `methods` restricts it to the
    named methods and their compositions.
    """
    if not isinstance(problem, Job):
        raise ConfigError("", "problem", f"expected a rematbench.Problem, not {problem!r}")
    _check_lists(methods=methods, folders=folders)
    _check_counts(top=top, processes=processes)
    if not (isinstance(within, int | float) and 0 <= within < 1):
        raise ConfigError(
            "", "within", f"expected a number of at least 0 and less than 1, not {within!r}"
        )
    if not isinstance(fixed, Mapping | None):
        raise ConfigError(
            "", "fixed", f"expected a mapping of degree names to values, not {fixed!r}"
        )
    asked = SearchRequest(
        spec=problem,
        fixed=convert(dict(fixed or {}), Fixed, "fixed"),
        only=tuple(methods),
        folders=tuple(Path(folder) for folder in folders),
        within=within,
    )
    job = SearchJob(asked).ready()
    *_, end = rounds(asked, shown=top, processes=processes)
    results = job.completed(end.results[:top])
    rows = _frame([search_row(place, one) for place, one in enumerate(results, 1)])
    rows.attrs["gap"] = end.gap
    return rows


def _frame(rows: Sequence[Mapping[str, object]]) -> "pd.DataFrame":
    """Rows as a DataFrame.  `simulate` avoids the import of pandas, which takes 0.3 seconds."""
    import pandas as pd  # noqa: PLC0415

    return pd.DataFrame(rows)


def _check_lists(**given: object) -> None:
    for name, names in given.items():
        if isinstance(names, str) or not isinstance(names, Sequence):
            raise ConfigError("", name, f"expected a list of names, not {names!r}")


def _check_counts(**given: object) -> None:
    for name, value in given.items():
        if type(value) is not int or value < 1:
            raise ConfigError("", name, f"expected a whole number above 0, not {value!r}")


def _job(problem: Job) -> PlannedJob:
    """The planned job of a problem; ConfigError for an argument that is no Problem."""
    if not isinstance(problem, Job):
        raise ConfigError("", "problem", f"expected a rematbench.Problem, not {problem!r}")
    return planned(problem)


__all__ = [
    "Estimate",
    "MethodError",
    "Problem",
    "Result",
    "compare",
    "estimate",
    "load_method",
    "search",
    "simulate",
]
