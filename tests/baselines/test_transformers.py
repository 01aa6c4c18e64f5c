"""Transformers traced: fake steps against real ones, what is refused, what checkpointing keeps."""

import json
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
import torch

pytest.importorskip("transformers")

from baselines.common.interface import NotRunnable
from baselines.transformers.families import FAMILIES, config_of
from baselines.transformers.saved import ROPE, SavedTensor
from tests.tables import tables

if TYPE_CHECKING:
    from baselines.transformers.traced_step import StepTrace

ROOT = Path(__file__).resolve().parents[2]
ROWS = 24
TINY: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 96,
}
QUICK = ("llama", "gemma2")
SLOWER = [pytest.param(f, marks=() if f in QUICK else pytest.mark.full) for f in FAMILIES]
SDPA = [family for family in FAMILIES if family != "gemma2"]
SHIMMED = [one for one in SLOWER if one.values[0] in SDPA]


def tiny(family: str, **keys: Any) -> Any:
    return config_of({"model_type": family, **TINY, **keys})


def run(config: Any, *, fake: bool = True, seq_len: int = ROWS, **setup: Any) -> "StepTrace":
    from baselines.transformers.traced_step import Setup, run  # noqa: PLC0415 - slow to collect

    return run(config, Setup(seq_len=seq_len, **setup), fake=fake)


def seen(family: str, *, fake: bool = True, **setup: Any) -> "StepTrace":
    return run(tiny(family), fake=fake, batch=2, **setup)


def in_layer(kept: SavedTensor) -> bool:
    """Whether every decoder layer keeps a storage like this one (the first keeps cos and sin)."""
    return ".layers" in kept.module and kept.function != ROPE


def layer_bytes(found: "StepTrace") -> int:
    """The mean bytes that one decoder layer keeps. They are its internals, or its input where the
    layer is checkpointed."""
    whole = sum(kept.nbytes * kept.layers for kept in found.saved if in_layer(kept))
    return whole // found.layers


def end_bytes(found: "StepTrace") -> int:
    """The bytes kept beside the layers: cos and sin, final norm, logits and loss."""
    return sum(kept.nbytes * kept.layers for kept in found.saved if not in_layer(kept))


def alike(traced: "StepTrace", real: "StepTrace") -> None:
    """All but the shim, which answers for values where there are none."""
    assert msgspec.structs.replace(traced, shim=()) == msgspec.structs.replace(real, shim=())


@pytest.mark.parametrize("checkpointing", [False, True], ids=["kept", "checkpointed"])
@pytest.mark.parametrize("family", SLOWER)
def test_a_trace_is_a_real_eager_step_byte_for_byte(family: str, checkpointing: bool) -> None:
    """Every storage by operator, every peak, on tensors with values and without."""
    setup = {"attention": "eager", "checkpointing": checkpointing}
    alike(seen(family, **setup), seen(family, fake=False, **setup))


@pytest.mark.parametrize("checkpointing", [False, True], ids=["kept", "checkpointed"])
@pytest.mark.parametrize("family", SHIMMED)
def test_a_trace_is_a_real_shimmed_step_byte_for_byte(family: str, checkpointing: bool) -> None:
    setup = {"attention": "sdpa", "checkpointing": checkpointing}
    found = seen(family, **setup)
    assert found.shim == ("flash", "unpacked")
    alike(found, seen(family, fake=False, **setup))


@pytest.mark.parametrize("family", SLOWER)
def test_a_trace_is_a_real_step_with_flash_attn(family: str) -> None:
    """The package's function keeps what torch's kernel keeps; a window needs no mask."""
    found = seen(family, attention="flash_attention_2")
    assert found.shim == ("flash_attn", "unpacked")
    alike(found, seen(family, fake=False, attention="flash_attention_2"))
    if family in SDPA:
        assert found.saved_bytes == seen(family, attention="sdpa").saved_bytes


def test_a_window_needs_no_mask_in_flash_attn() -> None:
    windowed, whole = (tiny("mistral", sliding_window=window) for window in (ROWS // 2, None))
    traces = [run(one, attention="flash_attention_2") for one in (windowed, whole)]
    assert traces[0] == traces[1]


def test_the_recorder_sees_what_plain_hooks_see() -> None:
    """Nothing of the recorder's own: storages that hooks are given, less parameters and ids."""
    config = tiny("llama")
    config.use_cache = False
    from transformers import LlamaForCausalLM  # noqa: PLC0415

    model = LlamaForCausalLM._from_config(
        config, dtype=torch.bfloat16, attn_implementation="eager"
    ).train()
    ids = torch.zeros(2, ROWS, dtype=torch.int64)
    own = {t.untyped_storage()._cdata for t in (*model.parameters(), *model.buffers(), ids)}
    kept: dict[int, Any] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage()._cdata] = tensor.untyped_storage()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = model(input_ids=ids, labels=ids).loss
    expected = sum(storage.nbytes() for key, storage in kept.items() if key not in own)
    assert seen("llama", attention="eager").saved_bytes == expected
    assert loss.requires_grad


def test_the_flash_kernel_computes_what_torch_computes() -> None:
    """Values and gradients of grouped queries, fp64's rounding apart; what it keeps by name."""
    from baselines.transformers import flash_shim  # noqa: PLC0415 - slow to collect

    torch.manual_seed(3)
    parts = [torch.randn(2, heads, 9, 8, requires_grad=True) for heads in (4, 2, 2)]
    settings: dict[str, Any] = {"is_causal": True, "scale": 0.3, "enable_gqa": True}
    wanted = torch.nn.functional.scaled_dot_product_attention(*parts, **settings)
    found = flash_shim.attend(*parts, **settings)
    torch.testing.assert_close(found, wanted)
    seed = torch.randn_like(wanted)
    expected = torch.autograd.grad(wanted, parts, seed)
    for one, other in zip(torch.autograd.grad(found, parts, seed), expected, strict=True):
        torch.testing.assert_close(one, other)


def test_flash_keeps_q_k_v_out_and_lse() -> None:
    kept = [k for k in seen("llama", attention="sdpa").saved if k.operator == "flash"]
    assert [(k.shape, k.dtype) for k in kept] == [
        ((2, 4, ROWS, 8), "bfloat16"),
        ((2, 2, ROWS, 8), "bfloat16"),
        ((2, 2, ROWS, 8), "bfloat16"),
        ((2, 4, ROWS, 8), "bfloat16"),
        ((2, 4, ROWS), "float32"),
    ]
    assert {k.layers for k in kept} == {2}
    assert not any(k.module.endswith("o_proj") for k in seen("llama").saved)  # it is the output


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_checkpointing_keeps_layer_inputs_only(attention: str) -> None:
    found = seen("llama", attention=attention, checkpointing=True)
    (inside,) = (k for k in found.saved if in_layer(k))
    assert (inside.operator, inside.layers) == ("checkpoint", 2)
    assert inside.nbytes == layer_bytes(found) == 2 * ROWS * TINY["hidden_size"] * 2
    whole = seen("llama", attention=attention)
    # What every layer is rebuilt with is alive still, though no operator keeps it.
    rope, positions = 2 * ROWS * TINY["head_dim"] * 2, ROWS * 8
    mask = 2 * ROWS * ROWS * 2 if attention == "eager" else 0
    assert end_bytes(whole) - end_bytes(found) == rope
    assert found.held_besides_bytes - whole.held_besides_bytes == rope + positions + mask
    rebuilt = found.peaks[3].activation_bytes - 2 * layer_bytes(found)
    assert rebuilt > layer_bytes(whole)


def test_a_layer_of_llama_is_its_closed_form() -> None:
    """Two eager norms (fp32 input, rsqrt, normalised, output), flash, four of SwiGLU."""
    tokens, hidden, ffn = 2 * ROWS, TINY["hidden_size"], TINY["intermediate_size"]
    norms = 2 * (8 * hidden + 4)
    flash = 2 * (2 * 32 + 2 * 16) + 4 * 4
    assert layer_bytes(seen("llama")) == tokens * (norms + flash + 4 * 2 * ffn)


def test_the_output_held_is_its_logits_alive() -> None:
    logits = 2 * ROWS * TINY["vocab_size"] * 2
    free, held = seen("llama"), seen("llama", holds_output=True)
    assert held.held_besides_bytes - free.held_besides_bytes == logits
    assert held.peaks[2].activation_bytes - free.peaks[2].activation_bytes == logits


def test_gradients_are_no_activations() -> None:
    found = seen("llama")
    assert found.gradient_bytes == found.parameter_bytes
    assert found.peaks[-1].end_bytes == 0
    assert found.peaks[-1].with_gradients_bytes > found.gradient_bytes


@pytest.mark.parametrize(
    ("family", "keys", "words"),
    [
        ("mistral", {"sliding_window": ROWS}, "a tensor of 1 x 1 x seq_len x seq_len"),
        ("gemma2", {}, "Gemma2ForCausalLM of Transformers has no SDPA: eager or flash_attention_2"),
        ("gemma", {"head_dim": 512}, "head_dim 512: a flash kernel has 256 at most"),
        ("llama", {"attention_dropout": 0.1}, "attention with dropout 0.1"),
    ],
)
def test_sdpa_that_is_no_flash_kernel_fails_with_one_line(
    family: str, keys: dict[str, Any], words: str
) -> None:
    with pytest.raises(NotRunnable, match=words) as raised:
        run(tiny(family, **keys))
    assert "\n" not in str(raised.value)


class RecomputedScores(torch.autograd.Function):
    """A kernel that makes its scores in the backward only."""

    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(q, k, v)
        return torch.empty_like(q)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, ...]:
        q, k, v = ctx.saved_tensors
        heads = torch.zeros_like(q) + q @ q.transpose(2, 3) @ gradients[0]
        return heads, torch.zeros_like(k), torch.zeros_like(v)


def test_scores_made_in_the_backward_under_sdpa_fail() -> None:
    from unittest.mock import patch  # noqa: PLC0415

    from baselines.transformers import flash_shim  # noqa: PLC0415 - slow to collect

    def attend(q: Any, k: Any, v: Any, *_: Any, **__: Any) -> Any:
        return RecomputedScores.apply(q, k, v)  # type: ignore[no-untyped-call]

    ((owner, name, _),) = flash_shim._PARTS["flash"]
    parts = {**flash_shim._PARTS, "flash": ((owner, name, attend),)}
    with (
        patch.object(flash_shim, "_PARTS", parts),
        pytest.raises(NotRunnable, match=r"a tensor of .*seq_len x seq_len"),
    ):
        run(tiny("llama"))


def test_a_length_that_is_a_width_is_no_square() -> None:
    config = tiny("llama")
    assert run(config, seq_len=TINY["hidden_size"]).saved_bytes > 0


@pytest.mark.parametrize("kind", ["phi3", "", "llama4"])
def test_a_family_not_modelled_is_refused_by_name(kind: str) -> None:
    with pytest.raises(NotRunnable, match=f"model_type '{kind}' .*traced: gemma, gemma2, llama"):
        config_of({"model_type": kind})


@pytest.mark.full
def test_the_command_says_in_one_line_what_it_does_not_run(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"model_type": "mixtral"}))
    command = [sys.executable, "-m", "baselines.transformers", str(config), "--seq-len", "8"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "UNSUPPORTED: model_type 'mixtral'" in done.stderr.splitlines()[-1]


@pytest.mark.full
@pytest.mark.parametrize("name", tables(__file__)["records"])
def test_a_committed_record_is_made_again(name: str, tmp_path: Path) -> None:
    """By the command of docs/packages.md; only versions of the machine and the date may differ."""
    model, attention, length, *more = name.split(".")
    out = tmp_path / "again.jsonl"
    config = f"tests/baselines/transformers/{model}.json"
    options = ["--seq-len", length, "--attention", attention, *(f"--{word}" for word in more)]
    command = [sys.executable, "-m", "baselines.transformers", config, *options, "-o", str(out)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=300)
    committed = ROOT / "results" / "measured" / "transformers" / f"{name}.jsonl"
    again, before = (json.loads(path.read_text()) for path in (out, committed))
    assert again["config"] == before["config"]
    assert again["setup"] == before["setup"]
    assert again["seen"] == before["seen"]
    assert again["stack"]["transformers"] == before["stack"]["transformers"]
