"""Layers that share weights, and bottleneck adapters behind frozen ones (adapter-ALBERT)."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from rematbench.costs.flops import model_flop_per_token
from rematbench.evaluate.evaluation import evaluate
from rematbench.inputs.layout import LayoutError
from rematbench.inputs.load import load_model
from rematbench.problem import Problem, rank_parameters
from rematbench.workload import Model
from tests.inputs.public_configs import PUBLIC
from tests.problems import LLAMA, layers, plan_of, problem

SHARED = replace(layers(4), layer_groups=2)


def albert(folder: Path, **changes: Any) -> Model:
    path = folder / "config.json"
    path.write_text(json.dumps(PUBLIC["albert-base-v2"][0] | changes), encoding="utf-8")
    return load_model(path)


def given(model: Model, *, work: dict[str, Any] | None = None, **layout: Any) -> Problem:
    made = problem(model=model, **layout)
    work = work or {}
    return dataclasses.replace(
        made, workload=replace(made.workload, **work), evaluator=evaluate, _memo={}, _weights={}
    )


def test_states_are_there_once_and_activations_for_every_layer() -> None:
    shared, apart = given(SHARED), given(layers(4))
    assert shared.workload.model.parameters == layers(2).parameters
    assert rank_parameters(shared, shared.base_plan, 0) == layers(2).parameters
    rows = [evaluate(p, plan_of(p, "keep_all")).ranks[0] for p in (shared, apart)]
    assert rows[0].activation_peak == rows[1].activation_peak
    for kind in ("parameter", "gradient", "optimizer"):
        layer = layers(4).parameters - layers(2).parameters
        mine, other = (getattr(row, kind) for row in rows)
        assert mine * layers(4).parameters == other * (layers(4).parameters - layer)
    assert evaluate(shared, shared.base_plan).step_s < evaluate(apart, apart.base_plan).step_s


def test_albert_has_the_parameters_of_its_class(tmp_path: Path) -> None:
    """Without the pooler, the sentence-order head and the bias of the output projection."""
    transformers = pytest.importorskip("transformers")
    torch = pytest.importorskip("torch")
    for groups in (1, 3):
        model = albert(tmp_path, num_hidden_groups=groups)
        config = transformers.AlbertConfig(
            **(PUBLIC["albert-base-v2"][0] | {"num_hidden_groups": groups})
        )
        with torch.device("meta"):
            whole = sum(p.numel() for p in transformers.AlbertForMaskedLM(config).parameters())
        assert model.parameters == whole - model.vocab
        p = given(model, seq_len=512)
        assert rank_parameters(p, p.base_plan, 0) == model.parameters
    assert "pooler" in model.left_out


def test_tokens_behind_count_in_attention(tmp_path: Path) -> None:
    model = albert(tmp_path)
    works = [
        given(replace(model, attends_all=both), seq_len=512).workload for both in (True, False)
    ]
    scores = 6 * (model.q_width + model.out_width) * 512 * model.num_layers
    found = [model_flop_per_token(work) for work in works]
    assert found[0] - found[1] == scores / 2


@pytest.mark.parametrize("bottleneck", [2, 8])
def test_a_bottleneck_adapter_trains_alone_and_keeps_what_it_reads(bottleneck: int) -> None:
    frozen = given(LLAMA, work={"bottleneck": bottleneck})
    hidden, table = LLAMA.hidden, frozen.layer(1)
    assert table.trained == 2 * (2 * hidden * bottleneck + bottleneck + hidden)
    names = {name for op in table.ops if op.trained for name in (op.name,)}
    assert names == {f"bottleneck_{a}_{b}" for a in ("attn", "mlp") for b in ("down", "up")}
    rows, e = table.activations["proj_out"].rows, frozen.workload.element_bytes
    kept = {n: table.activations[n].nbytes for n in table.saved if "bottleneck" in n}
    assert sum(kept.values()) == 2 * 2 * rows * bottleneck * e  # inside; the inputs beside
    assert {"proj_out", "fc2_out"} <= {*table.saved}
    assert not {"attn_norm_out", "mlp_norm_out", "fc2_in"} & {*table.saved}


def test_a_shared_layer_has_one_adapter() -> None:
    one, apart = (
        given(model, work={"bottleneck": 8}) for model in (SHARED, layers(SHARED.num_layers))
    )
    counts = [rank_parameters(p, p.base_plan, 0, trained=True) for p in (one, apart)]
    assert counts[0] * 2 == counts[1]


@pytest.mark.parametrize(
    ("layout", "words"),
    [({"pp": 2, "global_batch": 4}, "pp above 1"), ({"dp": 2, "zero_stage": 3}, "ZeRO 2")],
)
def test_what_is_not_modelled_says_its_parameters(layout: dict[str, int], words: str) -> None:
    with pytest.raises(LayoutError, match=rf"{words}.*M parameters"):
        given(SHARED, **{"global_batch": 2, **layout})


def test_narrow_embeddings_are_whole_on_a_rank(tmp_path: Path) -> None:
    with pytest.raises(LayoutError, match=r"tp or pp above 1.*11\.2 M"):
        given(albert(tmp_path), seq_len=512, tp=2)
