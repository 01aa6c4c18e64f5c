"""A new table, figure, suite or method is one file and a baseline one folder, and nothing else."""

from pathlib import Path

import pytest

from tests.method_files import method_file
from tests.workflow.checkout import ROOT, Checkout
from tests.worlds.slurm.slow import leave_methods

POLICY = "    candidates = facts_with_options = flags = inexpressible = partition = None\n"
FILES = {
    "src/rematbench/paper/tables/mine.py": '''"""Claims by system."""

from collections import Counter
from pathlib import Path

from rematbench.evidence.published.sheets import read_sheet
from rematbench.paper.sheet.table import Column, Table

INPUTS = {"published": "results/published/claims.csv"}


def build(published: Path) -> Table:
    counts = Counter(row["system"] for row in read_sheet(published))
    rows = tuple({"system": name, "claims": count} for name, count in counts.items())
    columns = (Column("system", "system"), Column("claims", "claims"))
    return Table(name="mine", title="Claims by system", columns=columns, rows=rows)
''',
    "figures/mine.py": '''"""Claims by system."""

import matplotlib.pyplot as plt
import pandas as pd
import style

TABLES = ("mine",)

source, target = style.arguments(2, "mine.csv FIGURE.pdf")
rows = pd.read_csv(source)
figure, axis = plt.subplots()
axis.bar(rows.system, rows.claims)
style.save(figure, target)
''',
    "config/mine.yaml": """
problems:
  - name: tiny
    why: one of mine
    model: tiny-llama
    cluster: this-machine
    system: rematbench
    gpus: 1
    seq_len: 64
    global_batch: 1
""",
    "methods/mine.py": method_file("mine"),
    "baselines/my_package/plan.py": method_file("my_package") + POLICY,
    "baselines/half/plan.py": method_file("half"),
}
SHOWN = """
from pathlib import Path
from rematbench.paper.page import gather, load_report
found = gather(load_report(), Path("results"))
print(*sorted(part.source for _, parts in found for part in parts if part.name == "mine"))
"""


@pytest.mark.full  # a method or a baseline alone: test_discover.py, test_dropped_in.py
def test_one_of_each_is_dropped_in_and_made_shown_run_and_listed(tmp_path: Path) -> None:
    checkout = Checkout(tmp_path)
    for name in ("measured", "searched"):
        (tmp_path / "results" / name).symlink_to(ROOT / "results" / name)
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    page = checkout.snakemake("results/index.html", "--dry-run").stdout
    assert {"rule table_mine:", "rule figure_mine:"} <= set(page.splitlines())
    leave_methods(tmp_path, {"keep_all", "mine"})
    targets = ("results/paper/figures/mine.pdf", "results/mine/tables/methods.csv")
    done = checkout.snakemake(*targets, "--quiet", "all")
    assert done.returncode == 0, done.stderr
    shown = checkout.run(["python", "-c", SHOWN])
    drawn = ["paper/figures/mine.pdf", "paper/tables/mine.csv"]
    assert shown.stdout.split() == drawn, shown.stderr
    assert "| mine " in (tmp_path / "results/mine/tables/methods.md").read_text()
    for words, name in (("table --list", "mine"), ("baseline list", "my_package")):
        assert name in checkout.run(f"rematbench {words}").stdout
    assert "half/plan.py: Mine has no candidates" in checkout.run("rematbench baseline list").stderr
