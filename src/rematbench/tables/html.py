"""The page as HTML: no script, no font, no file but itself."""

import html
from collections.abc import Mapping, Sequence
from pathlib import Path

from rematbench.matrix.commands import Commands
from rematbench.matrix.sweep import TABLES
from rematbench.matrix.tables import NAMES
from rematbench.published.sheets import read_sheet
from rematbench.tables.page import Page, Part, ReportConfig, parse, picture, table_html
from rematbench.tables.table import GIB

Row = Mapping[str, str]
KEY = (
    '<p class="key grid note"><span class="best">fastest</span><span class="tie">tie: within the '
    'error of ratios of the fastest</span><span class="out">hatched: outside of what was '
    'published</span><span class="oom">does not fit, by how much</span>'
    "A cell: tokens/s/GPU, MFU (causal), headroom; what binds (of the fastest: shares of its "
    "step); layout; 80 % band of the speed, and what of the job nobody published.</p>"
)


def page_html(page: Page) -> str:
    """The whole document: page.html.jinja around blocks that are HTML already."""
    from jinja2 import (  # noqa: PLC0415 (slow to load)
        Environment,
        FileSystemLoader,
        StrictUndefined,
    )

    sections = [
        (
            section,
            page.grids if any(part.name == "matrix_best_layout" for part in parts) else "",
            "".join(block(part, page.config, section.open) for part in parts),
        )
        for section, parts in page.sections
        if parts or section.text
    ]
    templates = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        keep_trailing_newline=True,
    )
    return templates.get_template("page.html.jinja").render(page=page, sections=sections)


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


def matrix_grids(tables: Path, commands: Commands) -> str:
    """Both matrices, one grid per model and cluster: arms by lengths, with the names that one types
    and each cell's command.  Never mixed."""
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
            made.append(
                f"<details{shown}><summary>{name}</summary>{_grid(own, commands)}</details>"
            )
    return "".join(made)


def _grid(rows: Sequence[Row], commands: Commands) -> str:
    lengths = sorted({int(row["seq_len"]) for row in rows})
    arms = list(dict.fromkeys(row["arm"] for row in rows))
    at = {(row["arm"], int(row["seq_len"])): row for row in rows}
    head = "".join(f"<th>{length // 1024}K</th>" for length in lengths)
    body = "".join(
        f"<tr><th>{html.escape(arm)}{_typed(arm, commands)}</th>"
        + "".join(_grid_cell(at.get((arm, length)), commands) for length in lengths)
        + "</tr>"
        for arm in arms
    )
    return (
        f'<div class="wide"><table class="grid"><thead><tr><th>method</th>{head}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )


def _typed(arm: str, commands: Commands) -> str:
    name = commands.names.get(arm, arm)
    shown = html.escape(name).replace("+", "+<wbr>")
    return "" if name == arm else f"<small><code>{shown}</code></small>"


def _grid_cell(row: Row | None, commands: Commands) -> str:
    if row is None:
        return '<td class="none">not run</td>'
    layout = f"<small>{html.escape(row['layout'])}</small>"
    command = html.escape(commands.of(row))
    if command:
        told = f"<p><code>{command}</code></p>"
        layout += f'<details class="more"><summary>run</summary>{told}</details>'
    if row["status"] == "oom":
        return f'<td class="oom"><small>{html.escape(row["binds"])}</small>{layout}</td>'
    if row["status"] != "ok":
        return f'<td class="none"><small>{html.escape(row["status"])}</small></td>'
    rank = row["rank"]
    mark = {"best": " fastest", "tie": " tie"}.get(rank, "")
    classes = " ".join(name for name in (rank, "out" if row["outside"] else "") if name)
    mfu, room = 100 * float(row["mfu_causal"]), float(row["headroom_bytes"]) / GIB
    band = f"{float(row['low']):,.0f} to {float(row['high']):,.0f}"
    tight = ", tight" if row["fits"] == "tight" else ""
    binds = f"<small>{html.escape(row['binds'])}</small>" if row["binds"] else ""
    outside = f"outside: {row['outside']}" if row["outside"] else "inside what was published"
    return (
        f'<td class="{classes}" title="{html.escape(outside, quote=True)}">'
        f"<b>{float(row['tokens_per_s_per_gpu']):,.0f}</b>{mark}"
        f"<small>MFU {mfu:.1f} %, {room:.1f} GiB free{tight}</small>{binds}{layout}"
        f"<small>{html.escape(band)}; {html.escape(outside)}</small></td>"
    )
