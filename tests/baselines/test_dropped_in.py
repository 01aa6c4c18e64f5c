"""A new baseline is one directory: dropped in, it is listed, held to the contract, and run."""

import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from rematbench.engine.lowering.lower import lower
from rematbench.evaluate.proof import check
from rematbench.inputs import paths
from rematbench.inputs.paths import data_dir
from rematbench.plan import Plan
from rematbench.worlds.packages.process import (
    BaselineError,
    NotInstalled,
    baselines,
    broken_baselines,
    job,
    loaded,
    policy,
    run_jobs,
)
from tests.baselines import test_contract as contract
from tests.problems import problem

pytest.importorskip("torch")

PLAN = '''"""toy: keeps everything, of no package at all.

Claim: nothing is freed.
Source: this test.
Deviations: none.
"""

from collections.abc import Iterator
from typing import ClassVar

from msgspec import Struct

from rematbench.plan import Plan
from rematbench.problem import Problem


class Toy(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`slope`: of its one parameter."""

    name: ClassVar[str] = "toy"
    slope: float = 2.0

    def plan(self, problem: Problem, base: Plan) -> Plan:
        """Keep all."""
        return base

    @classmethod
    def candidates(cls, problem: Problem) -> Iterator["Toy"]:
        """The only one."""
        yield cls()

    @classmethod
    def inexpressible(cls, problem: Problem) -> tuple[str, ...]:
        """Nothing."""
        return ()

    @classmethod
    def partition(cls, problem: Problem, plan: Plan) -> bool:
        """No option gives the layers of a stage."""
        return False

    @classmethod
    def facts_with_options(cls, problem: Problem) -> set[str]:
        """No fact of a stack has an option."""
        return set()

    def flags(self, problem: Problem, plan: Plan | None = None, *, whole: bool = False) -> str:
        """Its options."""
        return f"--slope {self.slope}"
'''
RUN = """import torch
import torch.distributed as dist
from baselines.common.interface import NotRunnable, RankAnswer


def stack():
    return {"torch": str(torch.__version__)}


def refuse(job):
    if job.run.parameters["toy"]["slope"] < 0:
        raise NotRunnable("toy: a negative slope")


def execute(job, rank):
    weight = torch.tensor([job.run.parameters["toy"]["slope"]], requires_grad=True)
    if weight > 9:
        raise KeyError("slope of rank")
    loss = (weight * (rank.rank + 1)).sum()
    loss.backward()
    dist.all_reduce(weight.grad)
    norms = {"weight": float(weight.grad)}
    return RankAnswer(label="toy", losses=[float(loss)], gradient_norms=[norms])


def trace(job):
    raise NotRunnable("toy: is not traced")
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A copy of baselines/ with the toy in it."""
    place = tmp_path / "baselines"
    shutil.copytree(data_dir("baselines"), place)
    (place / "toy").mkdir()
    (place / "toy" / "__init__.py").write_text('"""The toy."""\n')
    (place / "toy" / "plan.py").write_text(PLAN)
    (place / "toy" / "run.py").write_text(RUN)
    monkeypatch.setitem(paths.IN_CHECKOUT, "baselines", str(place))
    loaded.cache_clear()
    yield place
    loaded.cache_clear()
    sys.modules["baselines"].__path__.remove(str(place))
    for name in [name for name in sys.modules if name.startswith("baselines.toy")]:
        del sys.modules[name]


def test_it_is_listed_and_held_to_the_contract(folder: Path) -> None:
    assert {"toy", "megatron_core", "deepspeed"} <= baselines().keys()
    contract.test_the_docstring_says_claim_source_and_deviations("toy")
    contract.test_the_policy_knows_no_framework("toy")
    contract.test_run_has_the_four_functions("toy")
    contract.test_every_candidate_plans_lowers_and_is_safe("toy", "dp")
    contract.test_its_own_plans_are_equal_to_its_flags("toy")
    contract.test_a_problem_that_no_option_says_has_its_reasons("toy", "one")
    contract.test_settings_survive_the_run_spec("toy")


def test_one_that_breaks_the_contract_is_caught(folder: Path) -> None:
    run = folder / "toy" / "run.py"
    run.write_text(RUN.replace("def trace", "def traced"))
    with pytest.raises(AssertionError):
        contract.test_run_has_the_four_functions("toy")
    plan = folder / "toy" / "plan.py"
    plan.write_text(PLAN.replace("from msgspec", "import torch\nfrom msgspec"))
    with pytest.raises(AssertionError):
        contract.test_the_policy_knows_no_framework("toy")
    for text, reason in (("def flags(:", "SyntaxError"), ("def options(", "Toy has no flags")):
        plan.write_text(PLAN.replace("def flags(", text))
        loaded.cache_clear()
        sys.modules.pop("baselines.toy.plan", None)
        assert "megatron_core" in baselines()  # the others stay
        assert [path for path in broken_baselines() if "toy" in path] == [str(plan)]
        with pytest.raises(BaselineError, match=rf"toy/plan\.py: {reason}"):
            policy("toy")


def test_it_is_run_refused_fails_and_is_not_traced(
    folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Of a failure the record has a line and the terminal the rest."""
    made = problem(dp=2, zero_stage=0, global_batch=4)
    plan = policy("toy").plan(made)
    assert isinstance(plan, Plan)
    check(lower(plan, made))
    jobs = [
        job(made, policy("toy", {"slope": 3.0}), steps=1),
        job(made, policy("toy", {"slope": -1.0}), steps=1),
        job(made, policy("toy"), "traced"),
        job(made, policy("toy", {"slope": 10.0}), steps=1),
    ]
    ran, refused, traced, failed = run_jobs("toy", jobs, tmp_path / "records")
    assert ran.status == "ok"
    assert ran.measured.losses == (3.0,)
    assert ran.measured.gradient_norms == (3.0,)
    assert (refused.status, refused.reason) == ("unsupported", "toy: a negative slope")
    assert traced.status == "unsupported"
    assert "toy: is not traced" in traced.reason
    assert (failed.status, failed.reason) == ("failed", "KeyError: 'slope of rank'")
    shown = capfd.readouterr().err
    assert "toy/run.py" in shown, "where it happened"
    assert "KeyError: 'slope of rank'" in shown


def test_a_missing_package_is_one_line_that_says_what_to_do(folder: Path) -> None:
    run = folder / "toy" / "run.py"
    run.write_text("import no_such_package\n" + RUN)
    made = problem(dp=2, zero_stage=0, global_batch=4)
    with pytest.raises(NotInstalled, match="'no_such_package' is not installed here"):
        run_jobs("toy", [job(made, policy("toy"))])


@pytest.mark.full
def test_an_earlier_answer_in_the_same_folder_is_none_of_this_call(
    folder: Path, tmp_path: Path
) -> None:
    made = problem(dp=2, zero_stage=0, global_batch=4)
    for slope in (3.0, 4.0):
        (ran,) = run_jobs("toy", [job(made, policy("toy", {"slope": slope}), steps=1)], tmp_path)
        assert ran.measured.losses == (slope,)
    (folder / "toy" / "run.py").write_text("raise SystemExit('broken')\n")
    with pytest.raises(BaselineError, match="broken"):
        run_jobs("toy", [job(made, policy("toy"), steps=1)], tmp_path)
