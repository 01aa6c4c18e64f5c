"""The page as HTML: no script, no font, no file but itself."""

import html
from collections.abc import Mapping, Sequence
from pathlib import Path

from rematbench.matrix.sweep import TABLES
from rematbench.matrix.tables import NAMES
from rematbench.published.accuracy import number
from rematbench.published.sheets import read_sheet
from rematbench.report.page import Page, Part, ReportConfig, parse, picture, table_html
from rematbench.table import GIB

Row = Mapping[str, str]
STYLE = """
:root{--ink:#1a1a1a;--soft:#5c5c5c;--line:#d8d8d8;--bg:#fff;--blue:#0072b2}
*{box-sizing:border-box}
body{font:15px/1.5 system-ui,sans-serif;color:var(--ink);background:var(--bg);margin:0 auto;
max-width:1240px;padding:1rem 1.25rem 4rem}
h1{font-size:1.5rem;line-height:1.25;margin:.4rem 0 .6rem}
h2{font-size:1.2rem;margin:2.2rem 0 .5rem;border-bottom:2px solid var(--line);padding-bottom:.2rem}
h3{font-size:1rem;margin:1.4rem 0 .3rem}
.outcome{font-size:1.08rem;border-left:4px solid var(--blue);padding:.3rem 0 .3rem .9rem;
margin:.8rem 0}
dl{display:grid;grid-template-columns:max-content 1fr;gap:.15rem .9rem;margin:.8rem 0}
dt{font-weight:600}dd{margin:0}
nav{display:flex;flex-wrap:wrap;gap:.1rem .9rem}a{color:var(--blue)}
.wide{overflow-x:auto;max-width:100%}
table{border-collapse:collapse;font-size:12.5px;margin:.3rem 0}
th,td{padding:.18rem .5rem;border-bottom:1px solid var(--line);text-align:left;vertical-align:top}
th{border-bottom:2px solid var(--soft);font-weight:600}
td.n{text-align:right;font-variant-numeric:tabular-nums;white-space:nowrap}
td.t{min-width:9rem}td.ditto{color:var(--soft);text-align:center}
.note,.from{font-size:12.5px;color:var(--soft);max-width:75rem;margin:.25rem 0}
.from code{background:#f3f3f3;padding:0 .25rem}
img{max-width:100%;height:auto;display:block;margin:.3rem 0}
summary{cursor:pointer;font-weight:600;margin:.5rem 0}
.more summary{font-weight:400;color:var(--blue);margin:0;white-space:nowrap}
.more p{margin:.15rem 0;width:24rem;overflow-wrap:anywhere}
.grid td,.grid th{border:1px solid var(--line);min-width:6.6rem}
.grid th:first-child{min-width:9.5rem}
.grid td{font-variant-numeric:tabular-nums}
.grid b{font-size:13px}.grid small{display:block;font-size:10.5px;color:var(--soft);line-height:1.3}
.grid .best{background:#d9ecf7}.grid .tie{background:#eef6fb}
.grid .out{background-image:repeating-linear-gradient(135deg,transparent 0 7px,
rgba(0,0,0,.075) 7px 9px)}
.grid .oom{color:#8a3b00;background:#fbf3ec}.grid .oom small{color:#8a3b00}
.grid .none{color:var(--soft)}
.key span{display:inline-block;padding:.05rem .5rem;margin:0 .5rem .3rem 0;
border:1px solid var(--line)}
@media (max-width:820px){body{font-size:14px;padding:.6rem .8rem 3rem}dl{grid-template-columns:1fr}
dt{margin-top:.3rem}h1{font-size:1.25rem}}
"""
KEY = (
    '<p class="key grid note"><span class="best">fastest</span><span class="tie">tie: within the '
    'expected error of the fastest</span><span class="out">hatched: outside validated contexts, '
    'GPU counts or mechanisms</span><span class="oom">does not fit, by how much</span>'
    "A cell: tokens/s/GPU, MFU (causal), headroom; what binds (of the fastest: shares of its "
    "step); layout; evidence grade with the rule that found it and the expected error.</p>"
)


def page_html(page: Page) -> str:
    """The whole document."""
    title = html.escape(page.config.title)
    shown = [(section, parts) for section, parts in page.sections if parts or section.text]
    links = "".join(
        f'<a href="#s{i}">{html.escape(section.title)}</a>' for i, (section, _) in enumerate(shown)
    )
    facts = "".join(
        f"<dt>{html.escape(key)}</dt><dd>{html.escape(value)}</dd>" for key, value in page.facts
    )
    body = []
    for i, (section, parts) in enumerate(shown):
        text = f'<p class="note">{html.escape(section.text)}</p>' if section.text else ""
        grids = page.grids if any(part.name == "matrix_best_layout" for part in parts) else ""
        blocks = "".join(block(part, page.config, section.open) for part in parts)
        name = html.escape(section.title)
        body.append(f'<section id="s{i}"><h2>{name}</h2>{text}{grids}{blocks}</section>')
    missing = "".join(f"<li>{html.escape(text)}</li>" for text in page.config.not_modelled)
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f'<link rel="icon" href="data:,"><style>{STYLE}</style></head><body><h1>{title}</h1>'
        f'<p class="outcome">{html.escape(page.outcome)}</p><dl>{facts}</dl>'
        f'<nav>{links}<a href="#missing">What is not modelled</a></nav>{"".join(body)}'
        f'<section id="missing"><h2>What is not modelled</h2><ul>{missing}</ul></section>'
        "</body></html>\n"
    )


def block(part: Part, config: ReportConfig, opened: bool) -> str:
    """A table or figure with its source and command."""
    where = Path(*part.path.parts[-3:]).as_posix()
    if part.kind == "figure":
        caption = config.captions.get(part.name, part.name.replace("_", " "))
        pdf = where.removesuffix(".png") + ".pdf"
        alt = html.escape(caption, quote=True)
        return (
            f'<figure style="margin:1rem 0"><img src="{picture(part.path)}" alt="{alt}">'
            f'<figcaption class="note">{html.escape(caption)}</figcaption>'
            f"{_from(pdf, 'PDF', part.command)}</figure>"
        )
    title, heads, rows, note = parse(part.path.read_text(encoding="utf-8"))
    csv = where.removesuffix(".md") + ".csv"
    inner = (
        f"{table_html(heads, rows, config.folded)}"
        f'<p class="note">{html.escape(note)}</p>{_from(csv, "CSV", part.command)}'
    )
    if opened:
        return f"<h3>{html.escape(title)}</h3>{inner}"
    return f"<details><summary>{html.escape(title)}</summary>{inner}</details>"


def _from(path: str, kind: str, command: str) -> str:
    name, told = html.escape(path), html.escape(command)
    return f'<p class="from"><a href="{name}">{kind}</a> <code>{told}</code></p>'


def matrix_grids(tables: Path) -> str:
    """Both matrices, one grid per model and cluster: arms by lengths.  Never mixed."""
    made = [KEY]
    for number_of, table in enumerate(TABLES[::-1]):
        path = tables / f"{NAMES[table]}.csv"
        if not path.is_file():
            continue
        rows = read_sheet(path)
        made.append(f"<h3>The matrix, {html.escape(table)}</h3>")
        pairs = list(dict.fromkeys((row["model"], row["cluster"]) for row in rows))
        for index, (model, cluster) in enumerate(pairs):
            own = [row for row in rows if (row["model"], row["cluster"]) == (model, cluster)]
            shown = " open" if index == 0 and number_of == 0 else ""
            name = html.escape(f"{model}, {cluster}, {table}")
            made.append(f"<details{shown}><summary>{name}</summary>{_grid(own)}</details>")
    return "".join(made)


def _grid(rows: Sequence[Row]) -> str:
    lengths = sorted({int(row["seq_len"]) for row in rows})
    arms = list(dict.fromkeys(row["arm"] for row in rows))
    at = {(row["arm"], int(row["seq_len"])): row for row in rows}
    head = "".join(f"<th>{length // 1024}K</th>" for length in lengths)
    body = "".join(
        f"<tr><th>{html.escape(arm)}</th>"
        + "".join(_grid_cell(at.get((arm, length))) for length in lengths)
        + "</tr>"
        for arm in arms
    )
    return (
        f'<div class="wide"><table class="grid"><thead><tr><th>method</th>{head}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )


def _grid_cell(row: Row | None) -> str:
    if row is None:
        return '<td class="none">not run</td>'
    layout = f"<small>{html.escape(row['layout'])}</small>"
    if row["status"] == "oom":
        return f'<td class="oom"><small>{html.escape(row["binds"])}</small>{layout}</td>'
    if row["status"] != "ok":
        return f'<td class="none"><small>{html.escape(row["status"])}</small></td>'
    rank = row["rank"]
    mark = {"best": " fastest", "tie": " tie"}.get(rank, "")
    classes = " ".join(name for name in (rank, "out" if row["outside"] else "") if name)
    mfu, room = 100 * float(row["mfu_causal"]), float(row["headroom_bytes"]) / GIB
    error = number(row, "expected_error")
    grade = f"{row['grade']} ({row['rule']})" + (f" {100 * error:.0f} %" if error else "")
    binds = f"<small>{html.escape(row['binds'])}</small>" if row["binds"] else ""
    outside = f"outside: {row['outside']}" if row["outside"] else "inside the validated range"
    return (
        f'<td class="{classes}" title="{html.escape(outside, quote=True)}">'
        f"<b>{float(row['tokens_per_s_per_gpu']):,.0f}</b>{mark}"
        f"<small>MFU {mfu:.1f} %, {room:.1f} GiB free</small>{binds}{layout}"
        f"<small>{html.escape(grade)}</small></td>"
    )
