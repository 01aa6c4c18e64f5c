"""The answer of a search: its plans, then its planners or what would fit, printed or as JSON."""

import sys
from functools import partial
from typing import Any

import msgspec
from rich.console import Console

from rematbench.advise.search.by_layer import ByLayer
from rematbench.advise.search.job import search_row, with_engines
from rematbench.advise.search.limits import not_searched
from rematbench.advise.search.questions import would_fit
from rematbench.advise.search.request import Progress, Rounds
from rematbench.advise.search.rounds import SearchJob, rounds, solve_planners
from rematbench.advise.search.tie import of_packages, of_trainers, simplest
from rematbench.cli.inverse import in_words
from rematbench.cli.plan_table import summary
from rematbench.cli.search_output import (
    assumed_of,
    beside_line,
    notes,
    proof_lines,
    show_plans,
    where,
)
from rematbench.cli.show import say_notes
from rematbench.evaluate.result import Result
from rematbench.host.console import plain


class SearchAnswer:
    """The answer of the search `job`.  `at`: its last progress; `top`: how many of the fastest
    plans it has; `ended`: False after Ctrl-C; `out`: where it is printed (None: nowhere)."""

    def __init__(
        self, out: Console | None, job: SearchJob, at: Progress, top: int, *, ended: bool
    ) -> None:
        self.out, self.job, self.at, self.ended = out, job, at, ended
        self.results = [with_engines(item) for item in job.completed(at.results[:top])]
        self.not_shown = ""  # names the columns that had no room
        self.planned: list[Result] = []
        self.without: dict[str, str] = {}  # why planners have no plan that fits
        self.changes: list[str] = []
        self.simple: Result | None = None
        self.alone: dict[str, Result | None] = {}  # the best plan of each package's own options

    def table(self) -> None:
        if self.out is None:
            return
        self.not_shown = show_plans(self.out, self.job, self.results)
        self.out.print()
        for text in proof_lines(self.job, self.at, self.results, ended=self.ended):
            self.out.print(plain(text))

    def notes(self, *, solved: bool, every: bool) -> None:
        """Print notes on the table; `solved`: planners were solved; `every`: all notes."""
        if self.out is None:
            return
        lines = [*notes(self.job, self.at, self.results, solved=solved and self.ended)]
        say_notes(self.out, [*lines, *filter(None, [self.not_shown])], every=every)

    def more(self, limit_s: int, processes: int, *, by_layer: bool = False) -> None:
        """Print what follows the table of a search that ended: the simplest tied plan, the best
        plans of packages alone, planners (each within `limit_s` CPU seconds; 0: none) and plans
        tuned `by_layer`; if nothing fits, the changes that would make the job fit. After Ctrl-C,
        keep the answers so far. Without bounds do nothing, because the table then has all plans."""
        run = partial(rounds, processes=processes)
        if not self.job.bounded:
            return
        try:
            if self.ended and not self.results:
                self._changes(run)
            elif self.ended:
                self._beside(run)
                if limit_s:
                    self._planners(limit_s, processes)
                if by_layer:
                    self._by_layer()
        except KeyboardInterrupt:
            sys.stderr.write("interrupted: a longer search may give better plans\n")

    def _changes(self, run: Rounds) -> None:
        for change, result in would_fit(self.job.request, self.at, run):
            self.changes.append(f"{change}: {in_words(result)}")
            self._say(f"WOULD FIT: {self.changes[-1]}")

    def _beside(self, run: Rounds) -> None:
        best = self.results[0]
        _doing("searching for the simplest plan of the tie")
        self.simple = simplest(self.job, best, run)
        known = list(self.results)
        if self.simple is not None:
            self._say(f"SIMPLEST of the tied plans: {summary(self.simple, where(self.simple))}")
            known.append(with_engines(self.simple))
        _doing("searching the packages' own policies")
        for name, item in of_packages(self.job, known, run):
            self.alone[name] = item
            self._say(beside_line(f"{name} alone", item, best))
        for names, keys, item in of_trainers(self.job, known, run):
            self.alone[", ".join(names)] = item
            self._say(beside_line(f"{', '.join(names)} alone", item, best))
            self._say(f"  paste {keys}") if keys else None

    def _planners(self, limit_s: int, processes: int) -> None:
        best = self.results[0]
        _doing("solving planners at the layouts of the first rows")
        for item in solve_planners(self.job, self.results, limit_s=limit_s, processes=processes):
            end = item
            if item.fits:
                end = with_engines(self.job.completed([best, item])[1])
                self.planned.append(end)
            else:
                self.without[item.method] = item.reason
            self._say(beside_line("planner", end, best))

    def _by_layer(self) -> None:
        best, tuned = self.results[0], ByLayer(self.job)
        found = tuned.fastest(self.results)
        if found is not None:
            found = with_engines(self.job.completed([best, found])[1])
            self.planned += [found] if found.fitting_s < best.fitting_s else []
        self._say(beside_line(f"by layer ({tuned.trials} plans tried)", found, best))

    def _say(self, text: str) -> None:
        _doing("")
        if self.out is not None:
            self.out.print(plain(text))

    @property
    def rows(self) -> list[dict[str, Any]]:
        """A row for each plan with every number.  Planners' plans and plans tuned by layer have
        neither place nor bound, because the proof does not cover them."""
        apart = {"place": None, "bound_s": None}
        rows = [search_row(place, item) for place, item in enumerate(self.results, 1)]
        rows += [search_row(0, item) | apart for item in self.planned]
        results = (*self.results, *self.planned)
        engines = [{"runs_on": " ".join(item.runs_on)} for item in results]
        return [row | names for row, names in zip(rows, engines, strict=True)]

    @property
    def pictured(self) -> list[dict[str, Any]]:
        """Every number of the plans, and of the best plan of each package alone, named with their
        layouts."""
        rows = [
            item.row() | {"name": item.method.replace("+", "\n+") + f"\n{where(item)}"}
            for item in self.results
        ]
        return rows + [
            item.row() | {"name": f"{name} alone\n{where(item)}", "alone": True}
            for name, item in self.alone.items()
            if item and item.fits
        ]

    def json(self) -> str:
        """The answer and its proof as JSON."""
        count, rows = len(self.results), self.rows
        answer = {
            "gap": self.at.gap if self.results and self.job.bounded else None,
            "ended": self.ended,
            "layouts": len(self.job.space.choices),
            "plans": self.at.plans or None,
            "assumes": assumed_of(self.job),
            "rows": rows[:count],
            "planners": rows[count:],
            "simplest": search_row(0, self.simple) if self.simple else None,
            "packages": {
                n: search_row(0, item) if item else None for n, item in self.alone.items()
            },
            "planners_without_plan": self.without,
            "not_searched": not_searched(self.job),
            "refused": self.job.space.refused,
            "fell": self.at.excluded,
            "would_fit": self.changes,
        }
        return msgspec.json.format(msgspec.json.encode(answer)).decode()


def _doing(text: str) -> None:
    """Show on a terminal what the search does now; an empty text clears the line."""
    if sys.stderr.isatty():
        sys.stderr.write(f"\r{text}\x1b[K")
        sys.stderr.flush()
