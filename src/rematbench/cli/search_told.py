"""The answer of a search: its plans, then its planners or what would fit, printed or as JSON."""

import sys
from typing import Any

import msgspec
from rich.console import Console

from rematbench.advise.search.answer import Found, judged, line, with_engines
from rematbench.advise.search.halves import Progress
from rematbench.advise.search.job import SearchJob
from rematbench.advise.search.planners import solved
from rematbench.advise.search.questions import would_fit
from rematbench.cli.inverse import told
from rematbench.cli.search_shown import assumed_of, notes, planner_line, show_plans
from rematbench.host.console import plain


class Told:
    """The answer of the search `made` after its last progress, as far as it is known.  `found`: its
    `top` fastest plans; `ended`: False after Ctrl-C; `out`: where the answer is printed (None:
    nowhere)."""

    def __init__(
        self, out: Console | None, made: SearchJob, at: Progress, top: int, *, ended: bool
    ) -> None:
        self.out, self.made, self.at, self.ended = out, made, at, ended
        self.found = [with_engines(one) for one in judged(made, at.found[:top])]
        self.planned: list[Found] = []
        self.without: dict[str, str] = {}  # planners without a plan that fits, and why
        self.changes: list[str] = []

    def table(self, *, solved: bool) -> None:
        """Print the plans, the proof and what was excluded; `solved`: planners are solved next."""
        if self.out is None:
            return
        show_plans(self.out, self.made, self.found)
        solved = solved and self.ended
        for text in notes(self.made, self.at, self.found, ended=self.ended, solved=solved):
            self.out.print(plain(text), soft_wrap=True)

    def more(self, limit_s: int, processes: int) -> None:
        """What a search that ended asks last: planners beside its plans, each within `limit_s` CPU
        seconds (0: none); where nothing fits, the changes that would make the job fit.  After
        Ctrl-C, what is known so far."""
        try:
            if self.ended and not self.found:
                self._changes(processes)
            elif self.ended and limit_s:
                self._planners(limit_s, processes)
        except KeyboardInterrupt:
            sys.stderr.write("interrupted: what comes last may be better\n")

    def _changes(self, processes: int) -> None:
        for one in would_fit(self.made.asked, self.at, processes):
            self.changes.append(f"{one.change}: {told(one.tried)}")
            self._say(f"would fit {self.changes[-1]}")

    def _planners(self, limit_s: int, processes: int) -> None:
        best, shown = self.found[0], [one.tried for one in self.found]
        for end in solved(self.made, shown, limit_s=limit_s, processes=processes):
            one = None
            if end.tried is None:
                self.without[end.method] = end.reason
            else:
                one = with_engines(judged(self.made, [best.tried, end.tried])[1])
                self.planned.append(one)
            self._say(planner_line(end, one, best))

    def _say(self, text: str) -> None:
        if self.out is not None:
            self.out.print(plain(text), soft_wrap=True)

    @property
    def rows(self) -> list[dict[str, Any]]:
        """A line for each plan with every number.  A planner's plan has no place and no bound: the
        proof does not cover it."""
        apart = {"place": None, "bound_s": None}
        rows = [line(place, one) | _engines(one) for place, one in enumerate(self.found, 1)]
        return rows + [line(0, one) | _engines(one) | apart for one in self.planned]

    def json(self) -> str:
        """The answer with its proof."""
        count, rows = len(self.found), self.rows
        answer = {
            "gap": self.at.gap if self.found else None,
            "ended": self.ended,
            "layouts": len(self.made.space.choices),
            "plans": self.at.plans or None,
            "assumes": assumed_of(self.made),
            "rows": rows[:count],
            "planners": rows[count:],
            "planners_without_plan": self.without,
            "refused": self.made.space.refused,
            "fell": self.at.fell,
            "would_fit": self.changes,
        }
        return msgspec.json.format(msgspec.json.encode(answer)).decode()


def _engines(found: Found) -> dict[str, str]:
    return {"runs_on": " ".join(found.runs_on)}
