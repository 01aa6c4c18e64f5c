"""What has no time still has its bytes, its verdict, and the words that say what is missing."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from msgspec.structs import replace

import rematbench
from rematbench.evaluate.evaluation import RankBytes, host_rates
from rematbench.evaluate.problems import make_problem
from rematbench.evaluate.result import Result, evaluate_method, told_fragmented
from rematbench.evidence.bands import with_band
from rematbench.evidence.predict import predict_rows
from rematbench.inputs.configfile import ConfigError
from rematbench.inputs.job import Job
from rematbench.inputs.kernel_rates import RateError
from rematbench.inputs.load import calibration, load_cluster, load_model, load_system
from rematbench.inputs.system import with_facts
from tests.problems import all_methods, stacks
from tests.tables import tables
from tests.typed import typed

TABLES = tables(__file__)

GIB = 2**30
GENERATIONS = ("volta", "turing", "ada", "cdna3", "rdna3", "xe-hpc", "ampere", "blackwell")
OWN = TABLES["own"]
"""Files of GPUs whose kernels have no rates, with the numbers of their data sheets."""
SMALL = ("--model", "llama-7b", "--gpus", "1", "--seq-len", "512", "--global-batch", "1")


def cluster_file(folder: Path, name: str, gpu: str = "") -> str:
    """A file of OWN, of another GPU if one is named."""
    named = {"gpu": {"value": gpu, "source": "mine"}} if gpu else {}
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(OWN[name] | named), encoding="utf-8")
    return str(path)


def simulated(method: str = "keep_all", **given: Any) -> Result:
    """The result of a method, as `simulate` shows it."""
    sizes = {
        "model": "llama-7b",
        "system": "megatron-core",
        "gpus": 8,
        "tp": 8,
        "seq_len": 2048,
        "global_batch": 8,
    }
    problem = make_problem(Job(**{**sizes, **given}))
    found = evaluate_method(problem, all_methods().resolve(method, None, problem))
    return with_band(told_fragmented(found))


@pytest.mark.parametrize(("name", "generation", "verdict"), TABLES["without_rates"])
def test_a_gpu_without_rates_has_a_verdict(
    name: str, generation: str, verdict: str, tmp_path: Path
) -> None:
    words = ("simulate", "full_recompute", *SMALL, "--system", "huggingface-flash", "--zero", "0")
    ran = typed(*words, "--cluster", cluster_file(tmp_path, name))
    told = " ".join(ran.out.split())
    assert (ran.code, ran.err) == (0, "")
    assert verdict in told
    assert f"time not modelled: no kernel rates of {generation} (there are rates of" in told
    assert " 12.55 | 12.23 | 25.10 " in told  # the last gradients of a backward are not in the peak
    assert "tokens/s" not in told
    assert "80 % band" not in told


def test_the_json_says_the_same(tmp_path: Path) -> None:
    words = ("simulate", "keep_all", *SMALL, "--cluster", cluster_file(tmp_path, "mi300x"))
    found = json.loads(typed(*words, "--json").out)
    assert (found["status"], found["fits"], found["binds"]) == ("ok", "yes", "nothing")
    assert found["reason"] == found["not_timed"]
    assert found["reason"].startswith("time not modelled: no kernel rates of cdna3")
    assert {found[key] for key in ("step_s", "tokens_per_s_per_gpu", "hfu", "band")} == {None}
    assert found["peak_device_bytes"]["max"] > 50 * GIB


def without_workspaces(found: Result) -> list[RankBytes]:
    """The bytes of each rank without what libraries hold."""
    assert found.evaluation is not None
    held = found.problem.workspace_bytes
    return [replace(rank, pools=rank.pools - held) for rank in found.evaluation.ranks]


@pytest.mark.parametrize(
    "name", stacks("attention", "model_parallel", "workspaces", "cublas_bytes")
)
def test_every_generation_and_stack_has_a_verdict(name: str) -> None:
    """The bytes are those of the same GPU with rates, but for the workspaces of its generation; a
    kernel that a GPU cannot run is refused by name."""
    base, system, rates = load_cluster("h100-80gb"), load_system(name), calibration().kernels
    layout = {"tp": 8} if "tp" in system.accepts.model_parallel else {"tp": 1, "zero_stage": 3}
    reference = simulated(cluster=replace(base, name="mine"), system=name, **layout)
    for generation in GENERATIONS:
        cluster = replace(base, name="mine", gpu="mine", generation=generation)
        if rates.refusal(generation, system.kernels.attention):
            with pytest.raises(
                RateError, match=f"attention '{system.kernels.attention}' on {generation}"
            ):
                simulated(cluster=cluster, system=name, **layout)
            continue
        found = simulated(cluster=cluster, system=name, **layout)
        assert found.verdict is not None, (generation, found.reason)
        assert without_workspaces(found) == without_workspaces(reference)
        assert found.status in ("ok", "oom")
        if not calibration().has_rates(generation):
            assert found.not_timed.startswith(f"time not modelled: no kernel rates of {generation}")
        timed = not found.not_timed
        assert timed == (found.step_s is not None) == (found.error_band is not None)
        assert timed or found.fitting_s == float("inf")


def test_an_attention_without_a_published_rate_has_bytes() -> None:
    found = simulated(cluster="a100-80gb-selene", system="nemo-24.12")
    assert found.fits
    assert found.step_s is None
    assert "attention 'cudnn' on ampere: no published rate" in found.reason
    assert simulated(cluster="a100-80gb-selene", system="nemo-24.12", attention="fa2").step_s


@pytest.mark.parametrize("method", ["memo", "lynx_heu", "lynx_opt"])
def test_a_method_that_plans_by_seconds_is_refused_in_one_line(method: str) -> None:
    base = replace(load_cluster("h100-80gb"), gpu="mine", generation="volta")
    found = simulated(method, cluster=base, hbm_bytes=20 * GIB)
    assert found.status == "unsupported"
    assert found.reason.startswith(
        f"{method}: the method plans by seconds; time not modelled: no kernel rates"
    )


def test_compare_ranks_by_bytes(tmp_path: Path) -> None:
    words = ("compare", *SMALL, "--cluster", cluster_file(tmp_path, "mi300x"))
    only = ("--only", "keep_all", "--only", "full_recompute", "--only", "memo")
    ran = typed(*words, *only, "--processes", "1", "--notes")
    told = " ".join(ran.out.split())
    assert ran.code == 0, ran.err
    assert "FITS: full_recompute," in told
    assert "FASTEST" not in told
    assert "unsupported: memo: the method plans by seconds; time not modelled" in told
    rows = json.loads(typed(*words, *only, "--processes", "1", "--json").out)["rows"]
    assert [row["status"] for row in rows] == ["ok", "ok", "unsupported"]
    assert rows[0]["headroom_bytes"] > rows[1]["headroom_bytes"]
    assert {row["step_s"] for row in rows} == {row["compute_s"] for row in rows} == {None}
    assert not any(row["tied_with_best"] for row in rows)


def test_what_needs_seconds_refuses_in_one_line(tmp_path: Path) -> None:
    path = cluster_file(tmp_path, "mi300x")
    for words in (
        ("search", *SMALL, "--cluster", path),
        ("timeline", "keep_all", *SMALL, "--cluster", path, "-o", str(tmp_path / "t.json")),
    ):
        ran = typed(*words)
        assert ran.code not in (0, None)
        assert ran.err.count("\n") == 1
        assert "time not modelled: no kernel rates of cdna3" in ran.err
    spec = rematbench.Problem(
        model="llama-7b", cluster=path, system="megatron-core", gpus=1, seq_len=512, global_batch=1
    )
    with pytest.raises(ValueError, match="a search ranks plans by seconds; time not modelled"):
        rematbench.search(spec)
    assert rematbench.simulate(spec, "keep_all").fits
    assert rematbench.compare(spec, only=["keep_all"])["step_s"].isna().all()


def test_a_sheet_has_the_bytes(tmp_path: Path) -> None:
    row = {
        "model": "llama-7b", "cluster": cluster_file(tmp_path, "mi300x"), "gpus": "1", "tp": "1",
        "pp": "1", "seq_len": "512", "micro_batch": "1", "global_batch": "1",
        "system": "megatron-core", "recompute": "none", "offload_fraction": "0",
    }  # fmt: skip
    (found,) = predict_rows([row], processes=1)
    assert (found["pred_status"], found["pred_step_s"], found["pred_low"]) == ("ok", "", "")
    assert found["pred_reason"].startswith("time not modelled: no kernel rates of cdna3")
    assert found["pred_peak_device_bytes"] > 50 * GIB


@pytest.mark.parametrize("method", ["full_recompute", "optimizer_offload:share=0.5,visiting=0"])
def test_an_optimizer_on_a_node_without_a_rate_has_the_band_of_measured_rates(method: str) -> None:
    """72 billion parameters on eight A100 (published: they run): a verdict, what is missing, and a
    band with the speed at each measured rate."""
    cluster = load_cluster("a100-80gb-roce1600")
    words = {
        "model": "qwen2-7b", "gpus": 8, "seq_len": 8192, "global_batch": 16, "tp": 4,
        "system": "megatron-core-0.16", "optimizer": "host" if method == "full_recompute" else None,
    }  # fmt: skip
    found = rematbench.simulate(rematbench.Problem(cluster=cluster, **words), method)
    assert (found.fits, found.not_timed) == (True, "")
    assert found.band is not None
    assert found.error_band is not None
    evidence = found.error_band.evidence
    assert "an optimizer in host memory on cluster a100-80gb-roce1600, whose file has" in evidence
    assert "host_update_parameters_per_s (divide the parameters of " in evidence
    assert all(name in evidence for name in host_rates())
    for rate in host_rates().values():
        node = replace(cluster, host_update_parameters_per_s=rate * cluster.gpus_per_node)
        known = rematbench.simulate(rematbench.Problem(cluster=node, **words), method)
        assert found.band[0] < known.tokens_per_s_per_gpu < found.band[1]
        assert "host rate" not in known.error_band.outside


def test_every_command_takes_the_same_host_rate_and_band() -> None:
    """simulate, compare, search and a sheet's row, of a job whose cluster has no host rate."""
    words = {"model": "gpt-1.3b", "cluster": "a800-80gb", "system": "megatron-core", "gpus": 2}
    words |= {"seq_len": 2048, "global_batch": 8, "optimizer": "host", "tp": 2, "micro_batch": 2}
    spec = rematbench.Problem(**words)
    one = rematbench.simulate(spec, "keep_all")
    assert one.band is not None
    fixed = {"tp": 2, "cp": 1, "pp": 1, "micro_batch": 2, "zero_stage": 1, "sp": True}
    found = rematbench.search(spec, fixed=fixed, methods=["keep_all"], processes=1)
    for row in (rematbench.compare(spec, only=["keep_all"]).iloc[0], found.iloc[0]):
        told = (row[f"{end}tokens_per_s_per_gpu"] for end in ("", "low_", "high_"))
        assert tuple(told) == pytest.approx((one.tokens_per_s_per_gpu, *one.band))
        assert "host rate" in row["outside"]
    sheet = {"pp": "1", "recompute": "none", "offload_fraction": "0"}
    (row,) = predict_rows([sheet | {k: str(v) for k, v in words.items()}], processes=1)
    assert (row["pred_step_s"], row["pred_reason"]) == (pytest.approx(one.step_s), "")
    assert (row["pred_low"], row["pred_high"]) == pytest.approx(one.band)


@pytest.mark.parametrize("name", ["TPU-v5p", "tpu v4"])
def test_a_tpu_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="a TPU, on which none of these stacks runs"):
        load_cluster(cluster_file(tmp_path, "mi300x", name))


# -- fragmentation -------------------------------------------------------------------------------

YI = {
    "hidden": 7168, "ffn": 20480, "num_heads": 56, "num_kv_heads": 8, "head_dim": 128,
    "num_layers": 60, "vocab": 64000, "tied_embeddings": False,
}  # fmt: skip
"""Yi-34B, by its public config.json."""


def test_allocated_bytes_that_fit_are_said_to_fit_with_expandable_segments() -> None:
    """A published job of 32 A100 that trained, near the limit."""
    model = replace(load_model("llama-7b"), name="yi-34b", **YI)
    words = {
        "model": model, "cluster": "a100-80gb-roce1600", "system": "huggingface-deepspeed",
        "gpus": 32, "tp": 1, "seq_len": 262144, "global_batch": 32, "ulysses": 8, "zero_stage": 3,
    }  # fmt: skip
    found = rematbench.simulate(rematbench.Problem(**words), "full_recompute")
    assert (found.status, found.fit, found.fits) == ("fragmented", "expandable", False)
    assert found.reason.startswith("fits with expandable segments, else retries or fails: device")
    assert found.verdict.binds == found.reason
    system = with_facts(found.problem.system, name="mine", expandable_segments=True)
    assert rematbench.simulate(
        rematbench.Problem(**words | {"system": system}), "full_recompute"
    ).fits


def test_the_fields_of_the_verdict_agree() -> None:
    """From too little memory for the allocated bytes to enough for the reserved ones."""
    words = ("simulate", "keep_all", "--model", "qwen2-7b", "--seq-len", "16384")
    words += ("--global-batch", "1", "--gpus", "1", "--cluster", "h200-141gb-single", "--json")
    words += ("--system", "huggingface-flash", "--zero", "0")
    seen = []
    whole = json.loads(typed(*words, "--hbm-bytes", str(300 * GIB)).out)
    held = 300 * GIB - whole["headroom_bytes"]
    peak = whole["peak_device_bytes"]["max"]
    for nbytes in (*range(peak - GIB, held + 2 * GIB, max(GIB // 4, (held - peak) // 6)),):
        found = json.loads(typed(*words, "--hbm-bytes", str(nbytes)).out)
        retries, fits = found["allocator_retries"], found["fits"]
        seen.append(found["status"])
        assert (found["status"] == "fragmented") == (fits == "expandable") == retries["fails"]
        assert (found["status"] == "ok") == (fits in ("yes", "tight"))
        if fits in ("yes", "tight"):
            assert (found["reason"], found["binds"]) == ("", "nothing")
        else:
            assert found["reason"] == found["binds"]
    order = [word for at, word in enumerate(seen) if word not in seen[:at]]
    assert order == ["oom", "fragmented", "ok"]


def test_experts_that_drop_tokens_have_a_range_for_a_verdict() -> None:
    """A public job of 16 H800 that ran at capacity 1.0; experts filled to it drop none for less."""
    job: dict[str, Any] = {
        "model": "qwen3-30b-a3b", "cluster": "h800-80gb", "system": "megatron-core-0.16",
        "gpus": 16, "seq_len": 8192, "global_batch": 128, "pp": 2, "ep": 8, "capacity_factor": 1.0,
    }  # fmt: skip
    whole = rematbench.simulate(rematbench.Problem(**job), "keep_all")
    fewer = rematbench.simulate(rematbench.Problem(**job | {"capacity_factor": 0.75}), "keep_all")
    assert (whole.status, whole.fits, fewer.fits) == ("dropping", False, True)
    assert whole.reason.startswith(f"{fewer.headroom_bytes / GIB:.2f} GiB of headroom if experts")
    assert "(25% is enough)" in whole.reason
    room = int(1.3 * GIB)  # the next share needs less than this on top
    less = rematbench.simulate(
        rematbench.Problem(**job, hbm_bytes=whole.problem.cluster.hbm_bytes + room), "keep_all"
    )
    assert "(20% is enough)" in less.reason
    for others in ({"expert_padding": "capacity"}, {"global_batch": 256, "micro_batch": 2}):
        found = rematbench.simulate(rematbench.Problem(**job | others), "keep_all")
        assert found.status == "oom"
