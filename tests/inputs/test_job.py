"""A problem's one description: to a command line and back, to a file and back, at a layout."""

from typing import Any

import msgspec
import pytest
import typer
import yaml
from hypothesis import given
from hypothesis import strategies as st

from rematbench.cli.options import RunOptions, takes_problem, takes_run
from rematbench.evaluate.problems import make_problem
from rematbench.host.declared import flat
from rematbench.inputs.configfile import ConfigError, convert
from rematbench.inputs.job import Job
from rematbench.inputs.layout import Layout, LayoutError
from rematbench.inputs.load import load_cluster, load_model, load_system

COUNTS = st.integers(1, 1 << 20)
NAMES = st.text("abz019./ -_='\"", min_size=1).filter(lambda name: name[0] != "-")
SPECS = st.fixed_dictionaries(
    {
        **dict.fromkeys(("model", "cluster", "system"), NAMES),
        **dict.fromkeys(("gpus", "seq_len", "global_batch", "micro_batch"), COUNTS),
        **dict.fromkeys(("tp", "cp", "pp", "vpp", "ulysses"), st.integers(1, 64)),
        "zero_stage": st.sampled_from([0, 1, 2, 3]),
        "sp": st.sampled_from([None, False]),
        "attention": st.sampled_from(["flash", "unfused"]),
        "precision": st.sampled_from(["bf16", "fp16", "fp32", "fp64"]),
        "hbm_bytes": st.none() | st.integers(1 << 20, 1 << 60),
        "optimizer": st.sampled_from([None, "device", "host"]),
    }
).map(lambda facts: Job(**facts))
LAYOUTS = st.builds(
    Layout,
    **dict.fromkeys(("tp", "cp", "pp", "vpp", "ulysses", "dp"), st.integers(1, 64)),
    **dict.fromkeys(("micro_batch", "global_batch"), COUNTS),
    sp=st.booleans(),
    zero_stage=st.sampled_from([0, 1, 2, 3]),
)  # type: ignore[arg-type]  # strategies of each field
TINY: dict[str, Any] = {"model": "tiny-llama", "cluster": "h800-80gb", "system": "rematbench"}


def parsed(words: list[str], takes: Any = takes_run) -> RunOptions:
    """What a command gets that takes the options of a run."""
    got: list[RunOptions] = []

    def command(run: RunOptions) -> None:
        got.append(run)

    app = typer.Typer()
    app.command()(takes(command))
    app(words, standalone_mode=False)
    return got[0]


@given(SPECS)
def test_to_a_command_line_and_back(spec: Job) -> None:
    asked = parsed(["keep_all", *spec.to_arguments()])
    assert Job(**asked.problem) == spec
    assert asked.method == "keep_all"
    assert Job(**parsed(spec.to_arguments(), takes_problem).problem) == spec


@given(SPECS)
def test_to_a_file_and_back(spec: Job) -> None:
    text = yaml.safe_dump(flat(spec))
    assert convert(yaml.safe_load(text), Job, "job.yaml") == spec


@given(LAYOUTS)
def test_at_a_layout_and_back(layout: Layout) -> None:
    assert Job.at(layout, **TINY, seq_len=8).layout == layout


@pytest.mark.parametrize(("tp", "given_sp", "sp"), [
    (1, None, False), (2, None, True), (2, False, False), (2, True, True),
])  # fmt: skip
def test_sequence_parallelism_comes_with_tensor_parallelism(
    tp: int, given_sp: bool | None, sp: bool
) -> None:
    spec = Job(**TINY, gpus=2, seq_len=8, global_batch=2, tp=tp, sp=given_sp)
    assert spec.layout == Layout(tp=tp, sp=sp, dp=2 // tp, global_batch=2)


@pytest.mark.parametrize("gpus", [2, 6])
def test_ranks_must_divide_the_gpus(gpus: int) -> None:
    spec = Job(**TINY, gpus=gpus, seq_len=8, global_batch=2, tp=2, pp=2)
    told = rf"gpus {gpus} must be a multiple of tp x cp x pp = 2 x 1 x 2 = 4 \(for example \d"
    with pytest.raises(LayoutError, match=told):
        make_problem(spec)


def test_a_name_stands_for_what_it_names() -> None:
    numbers = {"gpus": 1, "seq_len": 8, "global_batch": 2, "hbm_bytes": 1 << 30}
    loaded = {"model": load_model, "cluster": load_cluster, "system": load_system}
    whole = {key: load(TINY[key]) for key, load in loaded.items()}
    named, other = (make_problem(Job(**parts, **numbers)) for parts in (TINY, whole))
    assert (named.workload, named.system, named.layout) == (
        other.workload,
        other.system,
        other.layout,
    )
    assert (
        named.cluster
        == other.cluster
        == msgspec.structs.replace(load_cluster("h800-80gb"), hbm_bytes=1 << 30)
    )
    with pytest.raises(ConfigError, match="model: a command line cannot express an object"):
        Job(**whole, **numbers).to_arguments()
