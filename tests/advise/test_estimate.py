"""A job's memory in one answer: the same bytes as simulate, and options that fit when tried."""

import json
from typing import Any

import rematbench
from tests.typed import typed

JOB: dict[str, Any] = {"cluster": "a100-80gb", "gpus": 4, "micro_batch": 2, "seq_len": 4096}
JOB |= {"system": "huggingface-flash"}
WORDS = "--cluster a100-80gb --gpus 4 --seq-len 4096 --global-batch 8 --system huggingface-flash"


def test_the_bytes_are_those_of_simulate_and_add_up() -> None:
    answer = rematbench.estimate("llama-3.1-8b", **JOB)
    job = rematbench.Problem(model="llama-3.1-8b", global_batch=8, **JOB)
    run = rematbench.simulate(job, "keep_all")
    assert not answer.fits
    assert answer.headroom_bytes == run.headroom_bytes
    assert sum(answer.ranks[0].values()) == run.device_total_bytes
    assert str(answer).splitlines()[0].startswith("OUT OF MEMORY: ")


def test_options_fit_when_they_are_tried() -> None:
    answer = rematbench.estimate("llama-3.1-8b", **JOB)
    tried = [
        one.removeprefix("would fit: ").partition(":")[0].split(", ") for one in answer.options
    ]
    assert ["full_recompute"] in tried
    assert ["--micro-batch 1"] in tried
    for words in tried:
        options = [word for text in words if text.startswith("--") for word in text.split()]
        method = [
            word for text in words if not text.startswith("--") for word in ("--method", text)
        ]
        batch = [] if "--micro-batch" in options else ["--micro-batch", "2"]
        ran = typed("fit", "llama-3.1-8b", *WORDS.split(), *options, *method, *batch, "--json")
        assert ran.code in (0, None), (words, ran.err)
        assert json.loads(ran.out)["verdict"].startswith("FITS: ")


def test_a_job_that_fits_nowhere_has_the_words_of_compare() -> None:
    job = (*WORDS.split(), "--gpus", "1", "--zero", "0", "--seq-len", "131072")
    ran = typed("fit", "llama-3.1-8b", *job)
    assert ran.code == 1
    assert "would fit: with " in ran.out
    assert "more memory on each device" in ran.out
