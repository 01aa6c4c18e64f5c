"""Every command's help: short options, words that are said once, and a start without heavy
imports."""

import re
import subprocess
import sys

import pytest

from rematbench.cli.app import GROUP, PLACES
from rematbench.costs.flops import over_peak
from tests.typed import typed

EVERY = [*PLACES, f"{GROUP} run", f"{GROUP} predict", f"{GROUP} list"]


@pytest.mark.parametrize("command", EVERY)
def test_h_is_help_and_outputs_have_one_name(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    said = typed(*command.split(), "-h")
    assert said.code == 0
    assert said.out.startswith(f"Usage: rematbench {command} ")
    assert not re.search(r"\(required\)\.\s+\[[^]]*required", said.out)
    for line in said.out.splitlines():
        if re.match(r"  (-o|--out)\b", line):
            assert line.startswith("  -o, --output"), line


def test_the_first_help_imports_neither_numpy_nor_pydantic() -> None:
    code = (
        "import sys; sys.argv[1:] = ['-h']\n"
        "from rematbench.cli.app import main\n"
        "try: main()\n"
        "except SystemExit: print(sorted({'numpy', 'pydantic', 'msgspec'} & sys.modules.keys()))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120
    )
    assert done.stdout.splitlines()[-1] == "[]"


def test_the_line_of_a_command_is_the_first_of_its_docstring() -> None:
    said = typed("--help-all").out
    for name in (*PLACES, GROUP):
        assert re.search(rf"^  {name} +\w", said, re.MULTILINE), name


@pytest.mark.parametrize(
    ("causal", "dense", "words"),
    [(0.5, 0.9, ""), (0.6, 1.1, "includes the half of attention"), (1.2, 1.3, "the peak")],
)
def test_an_mfu_over_100_percent_says_why(causal: float, dense: float, words: str) -> None:
    said = over_peak(causal, dense)
    assert words in said
    assert bool(said) == bool(words)


@pytest.mark.parametrize("words", [(), ("baseline",)])
def test_no_words_print_the_help(words: tuple[str, ...]) -> None:
    said = typed(*words)
    assert said.code == 2
    assert said.err == typed(*words, "-h").out
