"""Shell scripts: the values that bash gives their variables, without running anything."""

import sys
from pathlib import Path

import pytest

from rematbench.foreign.shell import options_of, read_script
from rematbench.inputs.configfile import ConfigError


def value(text: str) -> str:
    """The value of `--x` in the commands of a script."""
    options = [options_of(words) for words in read_script(text, "run.sh").commands]
    return " ".join(next(one["x"] for one in options if "x" in one))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("A=3\nrun --x $A", "3"),
        ("A=3 # three\nrun --x ${A}", "3"),
        ("A=${A:-4}\nrun --x $A", "4"),
        ("A=2\nA=${A:-4}\nrun --x $A", "2"),
        ("A=2; B=$((A*(3+1)/2))\nrun --x $B", "4"),
        ('A=" --y 1"\nA=" --x 5 ${A}"\nrun $A', "5"),
        ("A=(--y 1 # one\n  # --x 2\n  --x 3\n)\nrun ${A[@]}", "3"),
        ('A=()\nA+=("--x 6")\nB=(--y)\nB+=("${A[@]}")\nrun "${B[@]}"', "6"),
        ("A=1\nA+=0\nrun --x $A", "10"),
        ('CMD="run --x 7"\nsrun bash -c "$CMD --z \\$ID" 2>&1 | tee log', "7"),
        ("run --y 1 \\\n # --x 2 \\\n --x 8", "8"),
        ("E=1 F=2 run --x $F", "2"),
        ("run --x 1 --x 2 > log", "2"),
        ('A=full\nif [ "$A" = full ]; then B=1; else B=2; fi\nrun --x $B', "1"),
        ("A=b\nif [[ $A == a ]]; then B=1\nelif [[ $A == b ]]; then B=2\nfi\nrun --x $B", "2"),
        ('A=b\nif [ "$A" = a -o "$A" = b ]; then B=1; else B=2; fi\nrun --x $B', "1"),
        ('A=b\nif [ "$A" = a -o "$A" = b -a 1 = 2 ]; then B=1; else B=2; fi\nrun --x $B', "2"),
        ('A=8\nif [ $A -gt 4 ] && [ -n "$A" ]; then B=1; else B=2; fi\nrun --x $B', "1"),
        ('if [ -z "$UNSET" ]; then B=1; else B=2; fi\nrun --x $B', "1"),
        ("if [ ! -f here ]; then B=1; else B=2; fi\nrun --x $B", "2"),
        ("M=7b\ncase $M in\n 1b) B=1 ;;\n 7b|8b) B=2\n ;;\n *) B=3 ;;\nesac\nrun --x $B", "2"),
        ("for A in 1 2 4; do\nrun --x $A\ndone", "1"),
        ("while [[ $# -gt 0 ]]; do case $1 in -a) A=1; shift;; esac; done\nrun --x 9", "9"),
        ("u() { echo 'use: run'; }\nN=$(f \"$(g \"h\")\" | sed 's/a b//')\nrun --x 3$N", "3"),
        ("read -r -d '' ALL <<EOF\nrun --x 4 \\\n --y \"z\"\nEOF\ndeepspeed $ALL", "4"),
        ("export A='run --x' B=5\nsrun --y 1 bash -c 'ulimit; $A $B --z $ID'", "5"),
        ('A="run \\\n  --x 6 \\\n"\nexport A\nsrun bash -c "$A --y \\$ID"', "6"),
        ("T=2; C=$(( ($T > 1) ? 7 : 0 ))\nrun --x $C", "7"),
        ("T=2\nif [[ ! $T =~ ^[1-3]$ ]]; then B=1; else B=2; fi\nrun --x $B", "2"),
        ('grep -q a <<< "$X"\nrun --x 4', "4"),
        ("declare -A L=([7b]=32 [13b]=40)\nM=13b\nrun --x ${L[$M]}", "40"),
        ("A=(5 6 7)\nrun --x ${A[1]}", "6"),
        ('C="run --y --x 5 2>&1 | tee log"\neval $C', "5"),
        ("A=7\nrun --x $(echo $A)", "7"),
        ("A=(5 6 7)\nrun --x ${#A[@]}", "3"),
        ("f() { run --x $1 --y $#; }\nA=4\nf $A 5\ng() { run --x 9; }", "4"),
        ("A=4\n[ $A = 5 ] && A=6\n[[ -n $A ]] && A=7\nrun --x $A", "7"),
        ("A=4\n((A+=2))\nlet A*=2\nrun --x $A", "12"),
        ("A=3; B=$((A > 2 && A != 4 ? -A ** 2 : 0))\nrun --x $B", "9"),
        ("#SBATCH --nodes=6 # six\n#SBATCH -n 48\nrun --x $SLURM_NNODES", "6"),
    ],
)
def test_a_script_gives_the_values_that_bash_gives(text: str, expected: str) -> None:
    assert value(text) == expected


@pytest.mark.parametrize("text", ["run --x 'open", 'run "open', "A=(1 2", "run ${A"])
def test_a_script_without_an_end_is_refused_in_one_line(text: str) -> None:
    with pytest.raises(ConfigError, match="not a shell command"):
        read_script(text, "run.sh")


def test_a_script_without_the_parser_is_refused_in_one_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match="pip install shfmt-py"):
        read_script("run --x 1", "run.sh")
    (tmp_path / "shfmt").write_text('#!/bin/sh\necho "{}"\n')
    (tmp_path / "shfmt").chmod(0o755)
    assert read_script("run --x 1", "run.sh").commands == []


def test_nothing_is_executed(tmp_path: Path) -> None:
    target = tmp_path / "file.txt"
    read_script(f"A=$(touch {target})\nB=`touch {target}`\ntouch {target}\necho $((A=1))", "run.sh")
    assert not target.exists()


def test_a_variable_that_doubles_has_an_end() -> None:
    with pytest.raises(ConfigError, match="has no end"):
        read_script("A=aaaaaaaa\n" + "A=$A$A\n" * 60, "run.sh")
