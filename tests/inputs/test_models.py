"""Model shapes against published totals and against every shape in the published rows."""

import re
from functools import cache

import pytest

from rematbench.evidence.published.sheets import read_sheet
from rematbench.inputs.load import load_model, load_system, names
from rematbench.inputs.paths import data_dir
from rematbench.workload import Workload
from tests.problems import problem
from tests.tables import tables

TABLES = tables(__file__)

# Totals that the public checkpoints report (model cards, safetensors index), to the parameter.
EXACT = TABLES["exact"]

# Totals that papers round: (published, relative tolerance of their last digit).
ROUNDED = TABLES["rounded"]

SHAPE = TABLES["shape"]


@cache
def rows() -> list[dict[str, str]]:
    return read_sheet(data_dir("published") / "runs.csv")


@pytest.mark.parametrize("name", sorted(EXACT))
def test_parameters_equal_the_checkpoint(name: str) -> None:
    assert load_model(name).parameters == EXACT[name]


@pytest.mark.parametrize("name", sorted(ROUNDED))
def test_parameters_round_to_the_paper(name: str) -> None:
    published, tolerance = ROUNDED[name]
    assert load_model(name).parameters == pytest.approx(published, rel=tolerance)


@pytest.mark.parametrize(
    "name", [name for name in names("model") if re.fullmatch(r"(memo-)?gpt-[\d.]+[bt]", name)]
)
def test_a_name_with_a_size_has_that_size(name: str) -> None:
    number, unit = re.findall(r"([\d.]+)([bt])$", name)[0]
    size = float(number) * {"b": 1e9, "t": 1e12}[unit]
    assert load_model(name).parameters == pytest.approx(size, rel=0.06)


def test_mpt_parameters_equal_every_published_row() -> None:
    counted = 0
    for row in rows():
        if found := re.search(r"params (\d+)", row["note"]):
            work = Workload(model=load_model(row["model"]), seq_len=int(row["seq_len"]))
            assert work.model.parameters == int(found[1]), (row["model"], row["seq_len"])
            counted += 1
    assert counted == 70


def test_every_published_shape_is_a_config() -> None:
    assert len(rows()) == 455
    for row in rows():
        model = load_model(row["model"])
        published = {column: row[column] for column in SHAPE}
        assert {c: str(getattr(model, field)) for c, field in SHAPE.items()} == published


def test_published_learned_positions_cover_the_sequence() -> None:
    for row in rows():
        model = Workload(model=load_model(row["model"]), seq_len=int(row["seq_len"])).model
        assert model.position != "learned" or model.max_positions >= int(row["seq_len"])


def test_open_learned_positions_take_the_sequence_length() -> None:
    model = load_model("mpt-7b")
    work = Workload(model=model, seq_len=4096)
    assert model.max_positions == 0
    assert work.model.max_positions == 4096
    assert work.model.parameters - model.parameters == 4096 * 4096
    assert Workload(model=load_model("gpt-22b"), seq_len=1024).model.max_positions == 2048


def test_windows_repeat_over_the_layers() -> None:
    assert load_model("mistral-7b").attention_window == (4096,) * 32
    assert load_model("gemma-2-9b").attention_window == (4096, 0) * 21
    assert load_model("llama3-8b").attention_window == ()


def test_vocabulary_is_padded_by_the_system() -> None:
    assert load_system("megatron-deepspeed").padded_vocab(50257, 8) == 51200
    assert load_system("megatron-kwai").padded_vocab(32004, 1) == 32128
    assert load_system("torchtitan").padded_vocab(128256, 8) == 128256


@pytest.mark.parametrize(
    ("system", "forward"), [("megatron-lm", 6), ("megatron-core", 10), ("megatron-kwai", 10)]
)
def test_bytes_of_a_logit_while_a_megatron_loss_is_made(system: str, forward: int) -> None:
    """Logits in 16 bits, the saved softmax in fp32, and an fp32 copy where the version has one."""
    p = problem(system=system)
    table, elements = p.head, p.workload.seq_len * p.system.padded_vocab(p.workload.model.vocab, 1)
    loss = table.op("loss")
    held = sum(table.activations[name].nbytes for name in (*loss.inputs, *loss.outputs))
    assert (held + loss.scratch_forward_bytes) / elements == forward
