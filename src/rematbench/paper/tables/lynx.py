"""Tables of Lynx on its ladder of models: each policy at its best layout, and at equal layouts."""

from pathlib import Path

from rematbench.paper.sheet.table import Column, Table, columns, fixed, signed_percent, whole
from rematbench.paper.studies.answers import StudyAnswer, line, load_answers
from rematbench.paper.studies.rows import (
    METHOD,
    SIMULATED,
    STEP,
    VERDICT,
    WORKLOAD,
    Line,
    best,
    of,
    ratio,
    speed,
)

INPUTS = {"answers": "results/paper/studies/lynx.json"}
TABLES = ("lynx_ladder", "lynx_layouts")
RIVALS = ("selective", "full (uniform)", "full (block)")
EVEN = "lynx_heu, even stages"
LYNX = ("lynx_heu", "lynx_opt", EVEN)


def build(answers: Path) -> list[Table]:
    """All tables of the study."""
    found = load_answers([answers])
    return [lynx_ladder(found), lynx_layouts(found)]


def lynx_ladder(answers: list[StudyAnswer]) -> Table:
    """The best layout of Lynx compared with the best layouts of its rivals, per model and
    cluster."""
    runs = of(answers, "run")
    rows = []
    for workload in dict.fromkeys(answer.workload for answer in runs):
        asked = (RIVALS, LYNX[:1], LYNX[1:2], (EVEN,))
        rival, heu, opt, even = (best(runs, workload, names) for names in asked)
        full = best(runs, workload, RIVALS[1:2])
        keep = best(runs, workload, ("keep_all",))
        balanced = best(runs, workload, ("balanced",))
        rows.append(
            {
                **_place(runs, workload),
                "keep_all": speed(keep),
                "full": speed(full),
                "rival": speed(rival),
                "rival_name": f"{rival.method}, {rival.layout}" if rival else "none fits",
                "balanced": speed(balanced),
                "heu": speed(heu),
                "opt": speed(opt),
                "lynx_layout": heu.layout if heu else "none fits",
                "gain": ratio(speed(heu), speed(rival)),
                "gain_even": ratio(speed(even), speed(rival)),
                "gain_moved": ratio(speed(heu), speed(even)),
                "gain_full": ratio(speed(heu), speed(full)),
                "gap": _gap(heu, opt),
            }
        )
    return Table(
        name="lynx_ladder",
        title="Lynx on the GPT ladder, each policy at its best of the same layouts",
        columns=(
            WORKLOAD,
            *columns("cluster"),
            Column("keep_all", "keep all, tokens/s/GPU", whole),
            Column("full", "full (uniform), tokens/s/GPU", whole),
            Column("rival", "best rival, tokens/s/GPU", whole),
            Column("rival_name", "best rival"),
            Column("balanced", "balanced, tokens/s/GPU", whole),
            Column("heu", "HEU, tokens/s/GPU", whole),
            Column("opt", "OPT, tokens/s/GPU", whole),
            Column("lynx_layout", "HEU's layout"),
            Column("gain", "HEU over best rival", fixed(3)),
            Column("gain_even", "of it with the rivals' even stages", fixed(3)),
            Column("gain_moved", "of it by moving layers", fixed(3)),
            Column("gain_full", "HEU over full", fixed(3)),
            Column("gap", "HEU's step over OPT's %", signed_percent),
        ),
        rows=tuple(rows),
        note=SIMULATED + "Rivals: selective (without materialised scores it drops nothing), "
        "full (uniform, one layer) and full (block, as few layers as fit). Balanced rebuilds "
        "norms and activation functions without windows and is not among the paper's rivals: "
        "HEU's gain over it comes from windows and from moving layers, which the rivals do not "
        "do; the gain is the product of the two parts. Work in a window slows down, and so does "
        "the collective. The step shows this only on ranks without slack: if another rank (the "
        "one with the head) determines the step, the step equals that of keep all. The abstract "
        "says up to "
        "1.37x (v4), 1.02 to 1.53x (v1), of configurations that could not be read. If keeping "
        "everything fits at the best layout, there is nothing to gain.",
    )


def _place(runs: list[StudyAnswer], workload: str) -> Line:
    one = next(answer for answer in runs if answer.workload == workload)
    return {"workload": workload, "cluster": one.cluster}


def _gap(heu: StudyAnswer | None, opt: StudyAnswer | None) -> float | None:
    found = ratio(speed(opt), speed(heu))
    return None if found is None else found - 1


def lynx_layouts(answers: list[StudyAnswer]) -> Table:
    """Every policy at every layout; at equal layouts only the method makes a difference."""
    runs = of(answers, "run")
    rows = []
    for answer in runs:
        same = [a for a in runs if (a.workload, a.layout) == (answer.workload, answer.layout)]
        rival = best(same, answer.workload, RIVALS)
        over = ratio(speed(answer), speed(rival)) if answer.method in LYNX else None
        fits = answer.status == "ok"
        remark = str(answer.values.get("plan.bound", "")) if answer.method in LYNX else ""
        blocks = answer.values.get("num_layers")
        rows.append(
            {
                **line(answer),
                "gain": over if fits else None,
                "remark": f"{blocks} layers a chunk" if blocks else remark,
                "partition": answer.values.get("plan.layers", ""),
            }
        )
    return Table(
        name="lynx_layouts",
        title="Lynx on the GPT ladder, every policy at the same layout",
        columns=(
            WORKLOAD,
            *columns("layout"),
            METHOD,
            VERDICT,
            STEP,
            *columns("mfu_causal peak_device_bytes headroom_bytes"),
            Column("gain", "over the layout's best rival", fixed(3)),
            Column("partition", "layers of the stages"),
            *columns("remark"),
        ),
        rows=tuple(rows),
        note=SIMULATED + "If a plan does not fit, the table shows its step with enough memory.",
    )
