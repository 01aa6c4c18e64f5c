"""Drawn wrong inputs: flags, sheets, YAML files, config.json, records; and the commands that read
them.  What is drawn may be right by chance."""

import csv
import io
import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from hypothesis import strategies as st

from rematbench.inputs.paths import data_dir
from tests.tables import tables
from tests.typed import typed

CONFIG = data_dir("config")
RUN = {
    "--model": "llama-7b", "--cluster": "a800-80gb", "--system": "megatron-core", "--gpus": "4",
    "--seq-len": "4096", "--global-batch": "8", "--micro-batch": "1", "--tp": "2", "--cp": "1",
    "--pp": "2", "--vpp": "1", "--ulysses": "1", "--zero": "1", "--partition": "16,16",
    "--attention": "flash", "--precision": "bf16", "--set": "alpha=0.5", "--methods": "methods",
    "--hbm-bytes": "80000000000",
}  # fmt: skip
"""Options of a run that is right (but for --set, which some methods do not have)."""
METHODS = (
    *("keep_all", "full_recompute", "pp_offload", "memo", "mst", "selective_recompute"),
    *("full_recompute+mst", "megatron_core", "no_such_method", "", "+", "keep_all+keep_all"),
)
TABLES = tables(__file__)
LLAMA: dict[str, Any] = TABLES["llama"]
GPT2: dict[str, Any] = TABLES["gpt2"]
GEMMA = LLAMA | {"model_type": "gemma2", "hidden_activation": "gelu", "layer_types": None}
ROW: dict[str, str] = TABLES["row"]
PREDICTED = ROW | {
    "pred_tokens_per_s_per_gpu": "1100", "pred_step_s": "1", "pred_mfu_causal": "0.4",
    "pred_peak_device_bytes": "1e10", "pred_peak_host_bytes": "0",
    "pred_usable_bytes": "7e10", "pred_offload_fraction": "0.0",
    "pred_status": "ok", "pred_reason": "",
}  # fmt: skip


class Input(NamedTuple):
    """The words of a command, and the file (if any) that it reads."""

    words: tuple[str, ...]
    content: bytes | None = None
    name: str = ""

    def prepared(self, folder: Path) -> list[str]:
        """The words with the file written; `{in}` is its path and `{out}` one to write."""
        path = folder / self.name if self.name else folder
        if self.content is not None:
            path.write_bytes(self.content)
        return [word.format(**{"in": path, "out": folder / "out"}) for word in self.words]


NUMBERS = st.one_of(
    st.sampled_from([0, 1, -1, 2, 3, 7, 10**6, 2**31, 2**63, 10**11, 10**18, 10**30, 10**400]),
    st.sampled_from([0.0, 0.5, -1.5, 1e-300, 1e308, float("inf"), float("-inf"), float("nan")]),
    st.integers(),
)
TEXTS = st.one_of(
    st.sampled_from([
        "", " ", "nan", "inf", "1e999", "-1", "0x10", "1_0", "yes", "\u00e9\u4e16", "a\nb", "{x}",
        "../..", "/", "/dev/null", "no.yaml", "~", "[1, 2", "x" * 5000, "\u0660", "1,2,3", "%s",
    ]),
    st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=8),
)  # fmt: skip
VALUES = st.one_of(
    NUMBERS, TEXTS, st.none(), st.booleans(),
    st.sampled_from([[], {}, [1], [[]], {"value": 1}, {"value": None, "source": "x"}, [None] * 3]),
)  # fmt: skip
NO_FILES = st.one_of(
    st.binary(max_size=40),
    st.sampled_from([b"", b"\0", b"\xff\xfe", b"{", b"- 1\n", b"null", b"[]", b"[" * 3000]),
    st.sampled_from([b"a: &a [*a]\n", b"? {a: 1}\n: 2\n", b"!!python/object:os.x {}\n"]),
)


@st.composite
def changed(draw: st.DrawFn, good: dict[str, Any], values: st.SearchStrategy[Any] = VALUES) -> Any:
    """A mapping with one to three entries replaced, left out or added; one level down too."""
    made = dict(good)
    for _ in range(draw(st.integers(1, 3))):
        key = draw(st.sampled_from([*good, "no_such_key"]))
        inner = made.get(key)
        if draw(st.integers(0, 5)) == 0:
            made.pop(key, None)
        elif isinstance(inner, dict) and inner and draw(st.booleans()):
            made[key] = draw(changed(inner, values))
        elif isinstance(inner, list) and inner and isinstance(inner[0], dict):
            made[key] = [draw(changed(inner[0], values)), *inner[1:]]
        else:
            made[key] = draw(values)
    return made


def as_yaml(data: Any) -> bytes:
    return yaml.safe_dump(data, allow_unicode=True).encode("utf-8", "surrogatepass")


def as_json(data: Any) -> bytes:
    return json.dumps(data).encode()


def options(**more: str) -> tuple[str, ...]:
    left = {k: v for k, v in (RUN | more).items() if k not in ("--set", "--methods", "--partition")}
    return tuple(word for pair in left.items() for word in pair)


@st.composite
def flags(draw: st.DrawFn) -> Input:
    """Options of a run, some of them wrong."""
    command = draw(st.sampled_from(["simulate", "plan", "timeline", "simulate --check"]))
    made = dict(RUN)
    for key in draw(st.lists(st.sampled_from(["--set", "--methods", "--partition"]), max_size=2)):
        made.pop(key, None)
    for key in draw(st.lists(st.sampled_from(list(RUN)), min_size=1, max_size=3)):
        made[key] = str(draw(st.one_of(NUMBERS, TEXTS))).replace("\0", "")
        if key == "--set" and draw(st.booleans()):
            name = draw(st.sampled_from(["alpha", "num_layers", "every", "keep", "mlp"]))
            made[key] = f"{name}={made[key]}"
    output = ["-o", "{out}"] if command == "timeline" else []
    words = [word for pair in made.items() for word in pair]
    escaped = [word.replace("{", "{{").replace("}", "}}") for word in words]
    return Input((*command.split(), draw(st.sampled_from(METHODS)), *escaped, *output))


def sheet_of(rows: list[dict[str, Any]]) -> bytes:
    out = io.StringIO()
    columns = list(dict.fromkeys(key for row in rows for key in row))
    writer = csv.DictWriter(out, columns, restval="")
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue().encode("utf-8", "surrogatepass")


SHEETS = {
    "predict {in} -o {out} --processes 1": ROW,
    "validate --rows {in} --processes 1": ROW,
    "sheets {in} -o {out}.d": ROW,
    "validate --predictions {in}": PREDICTED,
    "tables {in} -o {out}.d": PREDICTED,
    "claims {in} --predictions {in} -o {out}.d": PREDICTED,
}


@st.composite
def sheets(draw: st.DrawFn) -> Input:
    """A sheet with wrong cells, columns or lines."""
    command = draw(st.sampled_from(list(SHEETS)))
    row = SHEETS[command]
    cells = st.one_of(NUMBERS, TEXTS).map(str)
    wrong = draw(changed(row, cells))
    content = sheet_of([wrong] if draw(st.booleans()) else [row, wrong])
    cut = draw(st.integers(0, 3))
    if cut == 0:
        at = draw(st.integers(0, len(content)))
        content = content[:at] + draw(NO_FILES) + content[at:]
    return Input(tuple(command.split()), content, "rows.csv")


def shipped(folder: str, name: str) -> dict[str, Any]:
    return dict(yaml.safe_load((CONFIG / folder / f"{name}.yaml").read_text(encoding="utf-8")))


def simulated(kind: str) -> tuple[str, ...]:
    return ("simulate", "full_recompute", *options(**{f"--{kind}": "{in}"}))


FILES: dict[str, tuple[tuple[str, ...], dict[str, Any], Callable[[Any], bytes]]] = {
    "model.yaml": (simulated("model"), shipped("models", "llama-7b"), as_yaml),
    "windows.yaml": (simulated("model"), shipped("models", "gemma-2-9b"), as_yaml),
    "cluster.yaml": (simulated("cluster"), shipped("clusters", "a800-80gb"), as_yaml),
    "system.yaml": (simulated("system"), shipped("systems", "megatron-core"), as_yaml),
    "suite.yaml": (
        ("cells", "{in}", "--store", "{out}.d"), shipped(".", "measure"), as_yaml,
    ),
    "config.json": (simulated("model"), LLAMA, as_json),
    "gemma.json": (simulated("model"), GEMMA, as_json),
    "gpt2.json": (simulated("model"), GPT2, as_json),
    "mpt.json": (simulated("model"), TABLES["mpt"], as_json),
}  # fmt: skip


@st.composite
def files(draw: st.DrawFn) -> Input:
    """A YAML file or config.json with wrong entries, or none at all."""
    name = draw(st.sampled_from(list(FILES)))
    words, good, write = FILES[name]
    content = draw(NO_FILES) if draw(st.integers(0, 7)) == 0 else write(draw(changed(good)))
    return Input(words, content, name)


@cache
def record(folder: Path) -> dict[str, Any]:
    """A record that is right."""
    path = folder / "good.json"
    done = typed("simulate", "full_recompute", *options(), "--out", str(path))
    assert done.code == 0, done.err
    return dict(json.loads(path.read_text(encoding="utf-8")))


@st.composite
def records(draw: st.DrawFn, folder: Path) -> Input:
    """A record with wrong entries, or none at all."""
    command = draw(st.sampled_from(["stages {in}", "timeline {in} -o {out}",
                                    "collect config/smoke.yaml {in} -o {out}.d"]))  # fmt: skip
    good = record(folder)
    content = draw(NO_FILES) if draw(st.integers(0, 7)) == 0 else as_json(draw(changed(good)))
    return Input(tuple(command.split()), content, "record.json")


def inputs(folder: Path) -> st.SearchStrategy[Input]:
    """Any wrong input."""
    return st.one_of(flags(), sheets(), files(), records(folder))
