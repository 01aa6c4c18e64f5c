"""Jobs of other packages: what each command or file is read as.

A title of the table has the start of its texts, then rows. A row has the rest of its `text`, the
`files` beside it and what is expected. `options`, `facts` of the written stack, `model`, `values`
and `read` are compared key by key (null: absent). Each of `words`, `refused` and `notes` stands in
a line ([]: there is no line), and what is `absent` stands nowhere. `command` is the whole equal
command; `error` stops the reading.

The forms of the scripts are those of public ones: NVIDIA/Megatron-LM (examples),
bigscience-workshop/bigscience (train/*.slurm), microsoft/Megatron-DeepSpeed (examples/MoE),
cmu-flame/FLAME-MoE, modelscope/ms-swift (examples), lm-sys/FastChat (scripts), QwenLM/Qwen
(finetune), hiyouga/LLaMA-Factory, huggingface/trl, OpenRLHF, huggingface/nanotron.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from rematbench.inputs.configfile import ConfigError
from tests.foreign import small_jobs
from tests.foreign.small_jobs import facts, job
from tests.tables import tables

JOBS = [
    pytest.param(start, row, id=f"{title} {number}")
    for title, (start, *rows) in tables(__file__).items()
    for number, row in enumerate(rows)
]


def whole(text: str) -> str:
    """The text with the small jobs that it names."""
    for name in ("TRL", "FACTORY", "AXOLOTL", "TITAN", "SIZES", "SWIFT"):
        text = text.replace(f"<{name}>", getattr(small_jobs, name))
    return text


@pytest.mark.parametrize(("start", "row"), JOBS)
def test_a_job_is_read_as_what_it_is(tmp_path: Path, start: str, row: dict[str, Any]) -> None:
    for name, text in row.get("files", {}).items():
        (tmp_path / name).write_text(whole(text))
    given = whole(start + row["text"]), row.get("name", "run.sh")
    if "error" in row:
        with pytest.raises(ConfigError, match=row["error"]):
            job(tmp_path, *given)
        return
    made, reading = job(tmp_path, *given, **row.get("given", {}))
    read = {"method": made.method, "settings": " ".join(made.settings)}
    read |= {"package": reading.package, "unknown": reading.unknown, "files": reading.files}
    read |= {"written": [*made.files]}
    every: dict[str, Mapping[str, object]] = {
        "options": made.options,
        "facts": facts(made),
        "read": read,
    }
    every |= {"model": reading.model, "values": reading.values}
    for part, values in every.items():
        assert {key: values.get(key) for key in row.get(part, {})} == row.get(part, {})
    texts = {"words": [" ".join(made.words)], "refused": reading.refused, "notes": reading.notes}
    for part, lines in texts.items():
        words = row.get(part)
        assert words != [] or not lines
        assert all(any(word in line for line in lines) for word in words or ()), lines
    assert row.get("command", texts["words"][0]) == texts["words"][0]
    said = "\n".join(line for lines in texts.values() for line in lines)
    assert not [word for word in row.get("absent", ()) if word in said]
