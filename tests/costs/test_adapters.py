"""What trains: saved bytes against PEFT's trace and closed forms, states by class of parameter, and
published peaks."""

import re
from typing import Any

import pytest
from msgspec.structs import replace

from rematbench.engine.lowering.lower import lower
from rematbench.engine.program.action import Kind
from rematbench.evaluate.evaluator import evaluate
from rematbench.evaluate.problems import make_problem
from rematbench.evaluate.proof import check
from rematbench.evidence.peaks import fits_word
from rematbench.evidence.published.row_cases import read_case
from rematbench.evidence.published.words import committed
from rematbench.inputs.job import Job
from rematbench.inputs.layout import LayoutError
from rematbench.inputs.load import load_model
from rematbench.model import Latent
from rematbench.plan import Plan, Unsupported
from rematbench.plugins.discover import discover
from rematbench.problem import Problem, rank_parameters, rank_states
from rematbench.workload import PACKED_BYTES
from rematbench.worlds.packages.limits import setup_of
from rematbench.worlds.packages.process import baselines
from rematbench.worlds.records.refusals import refusals
from tests.predicted import predicted
from tests.problems import all_methods
from tests.tables import tables

TABLES = tables(__file__)
RANK = 16
LATENT = Latent(kv_rank=512, nope=128, rope=64, v=128)


def made(system: str = "huggingface-flash", model: str = "llama-3.1-8b", **facts: Any) -> Problem:
    usual = {"cluster": "a100-80gb-single", "gpus": 1, "seq_len": 256, "global_batch": 1}
    return make_problem(Job(model=model, system=system, **usual | {"zero_stage": 0} | facts))


def saved(problem: Problem, layer: int, mask: int = 1) -> int:
    """Bytes a token that a layer saves; an element of a mask has `mask` bytes."""
    table = problem.layer(layer)
    sizes = {name: one.nbytes for name, one in table.activations.items() if name in table.saved}
    total = sum(size * (mask if name.endswith("_mask") else 1) for name, size in sizes.items())
    tokens = problem.workload.seq_len * problem.layout.micro_batch
    assert total % tokens == 0
    return total // tokens


@pytest.mark.parametrize(("traced", "facts"), TABLES["traced"])
def test_saved_bytes_equal_pefts_trace(traced: int, facts: dict[str, Any]) -> None:
    """PEFT on a Llama of two layers with the widths of 8B, Transformers 5.23, fake tensors: the
    mean over both layers; the input of the first one has no gradient.  A mask of torch's CPU
    dropout has the tensor's type, on a GPU a byte."""
    problem = made(**facts)
    assert (saved(problem, 0, 2) + saved(problem, 1, 2)) / 2 == traced


@pytest.mark.parametrize(("widths", "rank", "facts"), TABLES["fused"])
def test_a_layer_of_fused_kernels_saves_its_closed_form(
    widths: float, rank: int, facts: dict[str, Any]
) -> None:
    """f = 2.6875 h, activation and product apart: 37.5 h in 16 bits, beside the statistics of
    attention and 2 bytes for each of the columns of x A."""
    problem = made("rematbench", "llama2-7b", **facts)
    model = problem.workload.model
    statistics = 4 * model.num_heads
    assert saved(problem, 1) == widths * model.hidden + statistics + rank * RANK


def test_a_dropped_mask_or_a_gradient_of_a_frozen_matrix_would_be_seen() -> None:
    problem = made(lora_rank=RANK, lora_train="b", lora_dropout=0.1)
    table = problem.layer(1)
    assert not [op.name for op in table.ops if op.name.startswith("lora_") and op.has_weight]
    assert {name for name in table.saved if name.endswith("_mask")} == {
        f"lora_{target}_mask" for target in problem.workload.targets
    }
    trained = [op.name for op in table.ops if op.trained_parameters]
    assert trained == ["qkv", "proj", "fc1", "fc2"]


def test_full_fine_tuning_has_the_tables_of_before() -> None:
    problem = made()
    assert all(op.trained is None for table in problem.layer_kinds for op in table.ops)
    assert len(problem.layer_kinds) == 1
    assert rank_parameters(problem, problem.base_plan, 0) == problem.workload.model.parameters


def test_states_are_those_of_what_trains() -> None:
    """LoRA-r on all linears: r (in + out) each; weights in 16 bits, adapters and their states in
    fp32."""
    problem = made(lora_rank=RANK, trained_dtype="fp32")
    model = problem.workload.model
    h, f = model.hidden, model.ffn
    per_layer = 2 * (h + model.q_width) + 2 * (h + model.kv_width) + 3 * (h + f)
    count = RANK * per_layer * model.num_layers
    states = rank_states(problem, problem.base_plan, 0)
    assert states.parameter == 2 * model.parameters + 4 * count
    assert (states.gradient, states.optimizer) == (4 * count, 8 * count)
    assert rank_parameters(problem, problem.base_plan, 0, trained=True) == count


@pytest.mark.parametrize("dtype", [*PACKED_BYTES])
def test_packed_linears_have_the_bytes_of_their_format(dtype: str) -> None:
    problem = made(lora_rank=RANK, base_dtype=dtype)
    model = problem.workload.model
    linears = model.active_layer_matrices
    adapters = rank_parameters(problem, problem.base_plan, 0, trained=True)
    expected = float(linears * PACKED_BYTES[dtype]) + 2 * (model.parameters - linears + adapters)
    found = rank_states(problem, problem.base_plan, 0).parameter
    assert found == pytest.approx(expected, abs=2 * 8 * model.num_layers)
    up = problem.layer(1).op("fc1")
    assert up.widened_bytes == (2 * model.hidden * model.ffn,) * 2  # for each use
    first = problem.layer(0).op("qkv")  # its input has no gradient
    assert (first.widened_bytes[1], problem.layer(1).op("qkv").widened_bytes[1] > 0) == (0, True)
    wide = made(lora_rank=RANK)
    assert problem.cost.op_s(up, "forward") > wide.cost.op_s(wide.layer(1).op("fc1"), "forward")


def test_marlin_is_faster_in_few_rows_alone() -> None:
    """Bytes of a weight bound a product of few rows: 3.87 times as fast as fp16 is published of
    MARLIN's kernel (IST-DASLab/marlin, up to 32 rows).  Training has thousands of rows, and no
    kernel with a backward: weights are widened, and a step takes longer than with wide ones."""
    assert 2 / float(PACKED_BYTES["marlin"]) == pytest.approx(3.87, rel=0.005)
    facts: dict[str, Any] = {"lora_rank": RANK, "seq_len": 4096}
    packed, wide = made(base_dtype="marlin", **facts), made(**facts)
    assert evaluate(packed, packed.base_plan).step_s > evaluate(wide, wide.base_plan).step_s


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_zero_shards_what_trains_and_gathers_what_is_held(stage: int) -> None:
    facts = {"gpus": 4, "global_batch": 4, "zero_stage": stage, "lora_rank": RANK}
    problem = made("huggingface-deepspeed", cluster="a100-80gb", **facts)
    trained = rank_parameters(problem, problem.base_plan, 0, trained=True)
    held = rank_parameters(problem, problem.base_plan, 0)
    (rank,) = evaluate(problem, problem.base_plan).ranks
    assert rank.optimizer == 12 * -(-trained // 4)
    assert rank.gradient == 2 * (-(-trained // 4) if stage > 1 else trained)
    assert rank.parameter == 2 * (-(-held // 4) if stage == 3 else held)


@pytest.mark.parametrize(("tp", "sp"), [(2, True), (2, False), (4, True)])
def test_tensor_parallel_ranks_share_adapters(tp: int, sp: bool) -> None:
    """r (in + out) / t each.  Saved are 2 bytes of every token's inputs of A before qkv and fc1,
    once a linear, beside what ranks split: scores, o's and down's inputs, products and gates."""
    facts = {"gpus": tp, "lora_rank": RANK, "seq_len": 1024}
    problem = made("megatron-bridge", cluster="h100-80gb", tp=tp, sp=sp, **facts)
    alone = made("megatron-bridge", cluster="h100-80gb", lora_rank=RANK, seq_len=1024)
    counts = [rank_parameters(p, p.base_plan, 0, trained=True) for p in (problem, alone)]
    assert counts[1] == tp * counts[0]
    table, model = problem.layer(1), problem.workload.model
    gathered = [name for name in table.saved if name.endswith("_rows")]
    assert gathered == (["lora_q_rows", "lora_gate_rows"] if sp else [])
    whole = [table.activations[name].nbytes for name in gathered]
    assert whole == [2 * model.hidden * 1024] * len(gathered)
    for name in ("keep_all", "full_recompute"):
        plan = all_methods().resolve(name).plan(problem, problem.base_plan)
        assert isinstance(plan, Plan)
        assert check(lower(plan, problem)).reads > 0


def test_each_expert_of_a_rank_has_its_adapters() -> None:
    """A of h and of f columns, B of 2 f and of h rows (ms-swift, megatron/tuners/lora.py); saved
    are the inputs and both products of every copy of a token."""
    facts = {"cluster": "h100-80gb", "gpus": 4, "ep": 2, "lora_rank": 8, "global_batch": 4}
    both = [
        made("megatron-core", "qwen3-30b-a3b", lora_targets=targets, **facts)
        for targets in ("all", "q,k,v,o")
    ]
    problem, (table, before) = both[0], [one.layer(1) for one in both]
    h, experts = problem.workload.model.hidden, problem.workload.model.experts
    assert experts is not None
    assert table.trained_experts == 8 * 64 * (2 * h + 3 * experts.ffn)
    assert table.trained - table.trained_experts == before.trained
    more = 2 * table.activations["expert_in"].rows * (h + experts.ffn + 2 * 8)
    assert table.saved_bytes - before.saved_bytes == more
    assert "adapters of models with experts" in refusals(problem, problem.base_plan)
    program = lower(problem.base_plan, problem)
    check(program)
    acts = [a for a, _, _ in program.ranks[0].actions() if a.kind is Kind.ALL_REDUCE]
    sums = [a.exchange.comm for a in acts if a.exchange.comm and a.exchange.comm.group == "edp"]
    assert sum(comm.nbytes for comm in sums) == 4 * table.trained_experts * 48


def test_frozen_layers_have_no_backward_and_norms_can_train_alone() -> None:
    problem = made(frozen_layers=2)
    assert problem.layer(1).saved_bytes == 0
    assert not any(op.backward_input for op in problem.layer(1).ops)
    assert problem.layer(2).trained == problem.layer(2).parameters
    norms = made(trained_parts="norms")
    model = norms.workload.model
    count = rank_parameters(norms, norms.base_plan, 0, trained=True)
    assert count == model.hidden * (2 * model.num_layers + 1)


def test_weights_that_train_beside_adapters_are_copies() -> None:
    """PEFT keeps the frozen embedding and head too; alone they train in place."""
    ends = {"trained_parts": "embedding,head"}
    held = [
        rank_parameters(given, given.base_plan, 0)
        for given in (made(lora_rank=RANK), made(lora_rank=RANK, **ends), made(), made(**ends))
    ]
    assert held[1] - held[0] == 2 * 128256 * 4096
    assert held[3] == held[2]


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        ({"lora_rank": 4, "model": replace(load_model("llama2-7b"), latent=LATENT)}, "latent att"),
        *TABLES["refused"],
    ],
)
def test_what_is_not_modelled_is_one_line(facts: dict[str, Any], words: str) -> None:
    with pytest.raises(LayoutError, match=words):
        made(**facts)


@pytest.mark.parametrize(("kind", "own", "master"), TABLES["moments"])
def test_an_optimizer_replaces_the_moments_and_leaves_masters(
    kind: str, own: int, master: int
) -> None:
    assert made(optimizer_kind=kind).system.states.optimizer_bytes == own
    deepspeed = made("huggingface-deepspeed", optimizer_kind=kind).system.states
    assert deepspeed.optimizer_bytes == 4 + master


@pytest.mark.parametrize("facts", [{"lora_rank": 4}, {"optimizer_kind": "lion"}])
def test_no_package_is_said_to_run_it(facts: dict[str, Any]) -> None:
    """The flags of a package would start full training with Adam."""
    found = setup_of(made(**facts)).special_features
    assert found == setup_of(made()).special_features + found[-1:]
    for name in ("deepspeed", "megatron_core"):
        problem = made(name.replace("_", "-"), **facts)
        refused = baselines()[name].cls().plan(problem, problem.base_plan)
        assert isinstance(refused, Unsupported)
        assert found[-1] in refused.reason


@pytest.mark.parametrize("row", [3, 8, 17, 20, 24, 34, 35, 44, 48, 50, 54, 57, 64, 66, 70])
def test_published_peaks_of_adapters(row: int) -> None:
    """foundation-model-stack/fms-acceleration: Mistral-7B and Llama-2-70B on one GPU and on two
    with FSDP, packed 4,096 tokens, checkpointing, torch.cuda.max_memory_allocated."""
    (found,) = predicted([committed("adapters.csv")[row - 1]])
    published = float(found["peak_device_bytes"])
    assert float(found["pred_peak_device_bytes"]) == pytest.approx(published, rel=0.01)


@pytest.mark.parametrize(("column", "cell", "facts"), TABLES["words"])
def test_words_of_other_sheets_on_adapters(column: str, cell: str, facts: dict[str, Any]) -> None:
    row = dict(committed("adapters.csv")[34]) | {column: cell}
    work = read_case(row, discover(())).work
    assert {name: getattr(work, name) for name in facts} == facts


@pytest.mark.full
def test_all_published_peaks_of_adapters() -> None:
    """Every row.  Those that print nothing exceed the device, or leave too little of it to be sure
    (Llama-2-70B on two GPUs, whose totals are within 3 % of nvidia-smi's): FITS, TIGHT."""
    rows = predicted([*committed("adapters.csv")])
    ran = [row for row in rows if row["status"] == "ok"]
    assert len(ran) == 45
    for row in ran:
        assert row["pred_status"] == "ok"
        peak = float(row["peak_device_bytes"])
        assert float(row["pred_peak_device_bytes"]) == pytest.approx(peak, rel=0.01)
    silent = [row for row in rows if row["status"] != "ok"]
    edge = [row for row in silent if row["pred_status"] != "oom"]
    assert (len(silent), {(row["model"], row["gpus"]) for row in edge}) == (
        27,
        {("llama2-70b", "2")},
    )
    for row in edge:
        shown = re.search(r"nvidia-smi (\d+) MiB", row["note"])
        assert shown
        total = float(row["pred_device_total_bytes"])
        assert total == pytest.approx(int(shown[1]) << 20, rel=0.03)
        left, room = (float(row[f"pred_{name}_bytes"]) for name in ("headroom", "usable"))
        assert fits_word(left, room) == "tight"


@pytest.mark.full
def test_published_ratios_of_speeds() -> None:
    """LoRA over full training, and QLoRA over LoRA, of the same kernels, GPUs and micro-batches."""
    rows = [row for row in committed("adapters.csv") if row["model"] == "mistral-7b"]
    found = [row for row in predicted(rows) if row["status"] == "ok"]
    alike = ("kernels", "gpus", "micro_batch")
    speed, compared = "tokens_per_s_per_gpu", 0
    for over, under in (("lora", "full"), ("qlora", "lora")):
        by = {tuple(row[key] for key in alike): row for row in found if row["method"] == under}
        for row in found:
            if row["method"] == over:
                other = by[tuple(row[key] for key in alike)]
                published = float(row[speed]) / float(other[speed])
                ours = float(row[f"pred_{speed}"]) / float(other[f"pred_{speed}"])
                assert ours == pytest.approx(published, rel=0.10), row["row"]
                compared += 1
    assert compared == 28


def test_reentrant_units_of_fsdp_keep_frozen_inputs_and_gradients() -> None:
    """At the peak 2 h bytes a token more for each layer but the first, beside embedding and head,
    and no layer gathered ahead; with norms that train, no layer is frozen whole."""
    facts = {"gpus": 2, "global_batch": 2, "zero_stage": 3, "lora_rank": RANK, "seq_len": 4096}
    held = [0, 0]
    for index, parts in enumerate(("", "norms")):
        problem = made("huggingface-fsdp-4.46", trained_parts=parts, cluster="a100-80gb", **facts)
        plan = all_methods().resolve("full_recompute").plan(problem, problem.base_plan)
        assert isinstance(plan, Plan)
        allocs = [
            alloc
            for block in lower(plan, problem).ranks[0].blocks
            for action in block.actions
            for alloc in action.allocs
        ]
        held[index] = sum(one.nbytes for one in allocs if one.storage.tensor == "held")
    model = problem.workload.model
    assert held == [2 * 2 * model.hidden * 4096 * model.num_layers, 0]


def test_adapters_compute_in_16_bits_under_autocast_and_norms_widen_layers() -> None:
    """A 4-bit linear gives its adapter its own input, another one a copy of the copy."""
    facts: dict[str, Any] = {"lora_rank": RANK, "trained_dtype": "autocast"}
    packed = facts | {"base_dtype": "nf4"}
    model = made().workload.model
    assert saved(made(**facts), 1) > saved(made(**packed), 1)
    assert rank_states(made(**packed), made().base_plan, 0).optimizer == (
        rank_states(made(lora_rank=RANK, trained_dtype="fp32"), made().base_plan, 0).optimizer
    )
    wide, usual = made(fp32_norms=True, **packed), made(**packed)
    rows = wide.workload.seq_len
    assert wide.layer(1).activations["layer_input"].nbytes == 4 * model.hidden * rows
    assert "attn_norm_wide" not in wide.layer(1).activations
    assert wide.layer(1).activations["q"] == usual.layer(1).activations["q"]
    assert wide.layer(1).trained == usual.layer(1).trained
