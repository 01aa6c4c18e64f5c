"""Whatever a person types or hands over: an exit code, at most one line on stderr, no traceback."""

import signal
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.typed import Ran, typed
from tests.wrong_inputs import LLAMA, Input, as_json, inputs, options

MOST_S = 30.0
"""CPU seconds; what would take longer is refused by a stated bound."""
CHECKED = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.large_base_example]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("wrong")


@contextmanager
def in_time() -> Iterator[None]:
    def ring(*_: Any) -> None:
        raise TimeoutError(f"more than {MOST_S} CPU seconds")

    before = signal.signal(signal.SIGVTALRM, ring)
    signal.setitimer(signal.ITIMER_VIRTUAL, MOST_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


def ends_well(case: Input, folder: Path) -> Ran:
    words = case.prepared(folder)
    with in_time(), warnings.catch_warnings():
        warnings.simplefilter("error")  # a warning is a line that nobody can use
        ran = typed(*words)
    assert ran.code in (0, 1, 2)
    assert ran.err.count("\n") <= 1, ran.err
    assert "unsound" not in ran.err
    assert ran.code == 0 or ran.err or ran.out
    return ran


@settings(suppress_health_check=CHECKED)
@given(st.data())
def test_a_hundred_wrong_inputs_end_well(folder: Path, data: st.DataObject) -> None:
    """A quarter of them in the short run."""
    ends_well(data.draw(inputs(folder)), folder)


@pytest.mark.soak
@settings(max_examples=1000, suppress_health_check=CHECKED)
@given(st.data())
def test_a_thousand_wrong_inputs_end_well(folder: Path, data: st.DataObject) -> None:
    ends_well(data.draw(inputs(folder)), folder)


def run(**more: str) -> Input:
    flags = {f"--{key.replace('_', '-')}": value for key, value in more.items()}
    return Input(("simulate", "keep_all", *options(**flags)))


def config(**more: object) -> Input:
    return Input(
        ("simulate", "keep_all", *options(**{"--model": "{in}"})),
        as_json(LLAMA | more),
        "config.json",
    )


@pytest.mark.parametrize(
    ("case", "told"),
    [
        (run(seq_len="100000000000"), "exceed the limit of 68719476736 tokens"),
        (run(seq_len="17179869184"), "exceed the limit of 68719476736 tokens"),
        (run(gpus="1000000"), "exceed the limit of 65536"),
        (run(global_batch="10000000"), "exceed the limit of"),
        (run(ulysses="4"), "dp 1 must be a multiple of ulysses = 4"),
        (config(num_attention_heads=0), "num_attention_heads: expected int >= 1"),
        (config(num_hidden_layers=10**18), "num_hidden_layers: expected int <= 4096"),
        (config(hidden_size=10**400), "hidden_size: "),
        (config(quantization_config="fp8"), "quantization_config: expected object"),
        (config(vocab_size=float("nan")), "vocab_size: expected int"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_refused_is_named(folder: Path, case: Input, told: str) -> None:
    ran = ends_well(case, folder)
    assert ran.code == 2
    assert told in ran.err


@pytest.mark.parametrize(
    "content",
    [b"\0", b"? {a: 1}\n: 2\n", b"a: &a [*a]\n", b"a: " + b"[" * 3000, b"a: 2001-99-99\n", b"\xff"],
)
def test_what_is_no_yaml_is_one_line(folder: Path, content: bytes) -> None:
    words = ("simulate", "keep_all", *options(**{"--cluster": "{in}"}))
    ran = ends_well(Input(words, content, "mine.yaml"), folder)
    assert ran.code == 2
    assert "mine.yaml: " in ran.err
