"""The commands of a shell script, with the values of its variables.  Nothing is executed.

Read are assignments (also arrays, `+=` and defaults `${X:-8}`), calculations `$((A*B))`, `if` and
`case` over values that the script sets, files that it sources from its own folder, and
here-documents.  The output of a command, an argument (`$1`) and a variable of the environment are
empty, in conditions too; a test of a file is false, negated or not, and so is a command.
"""

import fnmatch
import operator
import re
import shlex
from collections.abc import Callable
from itertools import groupby
from pathlib import Path

from msgspec import Struct

from rematbench.foreign.reading import Options
from rematbench.foreign.shell_values import (
    LONGEST,
    Variables,
    assigned,
    expand_text,
    expand_words,
)
from rematbench.foreign.shell_words import Statement, split_statements
from rematbench.inputs.configfile import ConfigError, read_text

ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(?:\[[^\]]*\])?(\+?)=(.*)", re.DOTALL)
DECLARATIONS = {"export", "local", "readonly", "declare", "typeset"}
SBATCH = re.compile(r"^#SBATCH\s+([^#\n]*)", re.MULTILINE)
SLURM = {
    "nodes": ("SLURM_NNODES", "SLURM_JOB_NUM_NODES"),
    "ntasks-per-node": ("SLURM_NTASKS_PER_NODE",),
    "gpus-per-node": ("SLURM_GPUS_ON_NODE", "SLURM_GPUS_PER_NODE"),
}
"""Variables that Slurm sets from the headers of a job (sbatch's manual page)."""
SHORT = {"-N": "nodes", "-n": "ntasks"}
COMPARED: dict[str, Callable[[int, int], bool]] = {
    "-eq": operator.eq,
    "-ne": operator.ne,
    "-gt": operator.gt,
    "-ge": operator.ge,
    "-lt": operator.lt,
    "-le": operator.le,
}
SHELLS = {"bash", "sh", "/bin/bash", "/bin/sh"}
LAUNCHERS = {"srun", "nohup"}
BRACKETS = {"[", "[[", "]", "]]", "test", "((", "))"}
FILE_TESTS = {"-f", "-d", "-e", "-r", "-x", "-s"}
GPUS = re.compile(r"(?:[a-zA-Z][\w.-]*:)*(\d+)(?:\([^)]*\))?(?:,.*)?")
"""A number of GPUs, also with their kind (`gpu:a100:8`)."""
DEPTH = 8
"""Files that source files, at most."""


class Block(Struct):
    """An `if`, `case` or loop around a statement.

    `taken`: the statements of this branch are read; `ended`: a branch was taken; `condition`:
    the value so far while the words are a condition (None: they are not).
    """

    kind: str
    taken: bool = False
    ended: bool = False
    condition: bool | None = None
    joined: str = ""
    value: str = ""
    patterns: list[str] | None = None


class Script(Struct):
    """The commands of a script, each a list of words; its variables; its here-documents by the file
    into which they are written; the options of its Slurm headers; the conditions on values that are
    not in the script."""

    file: str
    variables: Variables = {}
    commands: list[list[str]] = []
    documents: dict[str, str] = {}
    headers: Options = {}
    undecided: list[str] = []


def read_script(text: str, file: str) -> Script:
    """The commands of a script.  ConfigError if the text is not a shell script."""
    script = Script(file=file, variables={"#": ["0"]})
    words = shlex.split(" ".join(SBATCH.findall(text)))
    script.headers = options_of([_long(word) for word in words])
    for option in ("gpus-per-node", "gres"):
        gpus = GPUS.fullmatch(" ".join(script.headers.get(option, [])))
        if gpus:
            script.headers["gpus-per-node"] = [gpus[1]]
            break
    for option, names in SLURM.items():
        for name in names if script.headers.get(option) else ():
            script.variables[name] = script.headers[option][-1:]
    _read(script, text, Path(file).parent, DEPTH)
    return script


def _long(word: str) -> str:
    short = word[:2]
    return (
        f"--{SHORT[short]}={word[2:]}"
        if short in SHORT and word[2:]
        else (f"--{SHORT[word]}" if word in SHORT else word)
    )


def options_of(words: list[str]) -> Options:
    """The options among words, each with its values.  The last of two equal options counts;
    redirections are left out."""
    options: Options = {}
    values: list[str] = []
    skipped = False
    for word in words:
        if skipped:
            skipped = False
        elif redirection := re.fullmatch(r"(?:\d|&)?[<>]+(.*)", word):
            skipped = not redirection[1]
        elif re.match(r"--\w", word):
            name, equals, value = word[2:].partition("=")
            values = options[name] = [value] if value else []
            values = [] if equals else values  # `--name=value` has one
        else:
            values.append(word)
    return options


def _read(script: Script, text: str, folder: Path, depth: int) -> None:
    blocks: list[Block] = []
    for statement in split_statements(text, script.file):
        words = _keywords(script, statement, blocks)
        if not words:
            continue
        if words[0] in (".", "source") and len(words) > 1 and depth:
            beside = folder / Path(expand_text(words[1], script.variables)).name
            if beside.is_file():
                _read(script, read_text(beside, str(beside)), beside.parent, depth - 1)
            continue
        _run(script, words, statement.document, depth)


def _keywords(script: Script, statement: Statement, blocks: list[Block]) -> list[str]:
    """The words of a statement that are read as a command: those after the keywords, which open and
    close blocks; none in a pattern, in a condition, or in a branch that is not taken."""
    words = list(statement.words)
    while words and (not blocks or blocks[-1].patterns is None or words[0] == "esac"):
        used = _keyword(script, words, blocks)
        if not used:
            break
        words = words[used:]
    block = blocks[-1] if blocks else None
    if block is not None and block.patterns is not None:
        _pattern(script, block, words, statement.end)
        return []
    if block is not None and block.condition is not None:
        if all(outer.taken for outer in blocks[:-1]):
            _decide(script, block, words, statement.end)
        return []
    taken = all(outer.taken for outer in blocks)
    if block is not None and statement.end == ";;":
        block.taken, block.patterns = False, []
    return words if taken else []


def _keyword(script: Script, words: list[str], blocks: list[Block]) -> int:
    """Apply the keyword at the beginning of some words; the number of its words (0: none)."""
    word = words[0]
    if word in ("if", "while", "until"):
        blocks.append(Block(kind=word, condition=False))
    elif word in ("for", "case") and len(words) > 1:
        blocks.append(_opened(script, words))
        return 3 if word == "case" else len(words)
    elif word in ("fi", "done", "esac") and blocks:
        blocks.pop()
    elif word in BRANCHES and blocks:
        BRANCHES[word](blocks[-1])
    else:
        return int(word in PREFIXES)
    return 1


def _then(block: Block) -> None:
    if block.condition is not None:
        block.taken = block.condition and not block.ended
        block.ended, block.condition = block.ended or block.taken, None


def _elif(block: Block) -> None:
    block.taken, block.condition, block.joined = False, False, ""


def _else(block: Block) -> None:
    block.taken, block.ended = not block.ended, True


BRANCHES = {"then": _then, "do": _then, "elif": _elif, "else": _else}
PREFIXES = {"{", "}", "time", "function", "!", "eval", "exec"}
"""Words before a command that change nothing which is read."""


def _opened(script: Script, words: list[str]) -> Block:
    """The block of `case WORD in` or `for NAME in WORDS`; a loop is read with its first word."""
    if words[0] == "case":
        return Block(kind="case", value=expand_text(words[1], script.variables), patterns=[])
    values = [one for word in words[3:] for one in expand_words(word, script.variables)]
    script.variables[words[1]] = values[:1]
    return Block(kind="for", taken=True)


def _pattern(script: Script, block: Block, words: list[str], end: str) -> None:
    """Add a pattern of `case`; its `)` decides whether the branch is taken."""
    patterns = [*(block.patterns or []), *(expand_text(word, script.variables) for word in words)]
    block.patterns = patterns
    if end == ")" and patterns:
        fits = any(fnmatch.fnmatchcase(block.value, pattern) for pattern in patterns)
        block.taken = fits and not block.ended
        block.ended, block.patterns = block.ended or fits, None


def _decide(script: Script, block: Block, words: list[str], end: str) -> None:
    """Join a test with the tests of a condition before it."""
    value = bool(words) and _test(script, words)
    before = bool(block.condition)
    joins = {"": value, "&&": before and value, "||": before or value}
    block.condition = joins.get(block.joined, before)
    block.joined = end if end in ("&&", "||") else "\n"


def _test(script: Script, words: list[str]) -> bool:
    """The value of a test; False for a test of a file or of a command."""
    plain = [word for word in words if word not in BRACKETS]
    for sign, joined in (("-o", any), ("-a", all)):
        if sign in plain[1:-1] and len(plain) < len(words):
            parts = [[*part] for apart, part in groupby(plain, sign.__eq__) if not apart]
            return joined([_test(script, ["[", *part]) for part in parts])
    if plain[:1] == ["!"]:
        tested = plain[1:] if len(plain) < len(words) else words[1:]
        return bool(tested) and tested[0] not in FILE_TESTS and not _test(script, ["[", *tested])
    if len(plain) == len(words):
        return words[0] == "true"
    values = [expand_text(word, script.variables) for word in plain]
    if len(values) == 2 and values[0] in ("-n", "-z"):
        return bool(values[1]) == (values[0] == "-n")
    if len(values) == 3:
        return _compared(script, words, *values)
    return len(values) == 1 and bool(values[0])


def _compared(script: Script, words: list[str], left: str, sign: str, right: str) -> bool:
    if not left and right:
        script.undecided.append(" ".join(words))
    if sign in ("=", "==", "!="):
        return fnmatch.fnmatchcase(left, right) == (sign != "!=")
    if sign == "=~":
        return _matches(left, right)
    if sign in COMPARED and left.isdigit() and right.isdigit():
        return COMPARED[sign](int(left), int(right))
    return False


def _matches(text: str, pattern: str) -> bool:
    try:
        return re.search(pattern, text) is not None
    except re.error:
        return False


def _quoted(document: str) -> str:
    """A here-document as a word: its quotes are plain, its variables are not."""
    joined = document.replace("\\\n", " ")
    return "".join(f"\\{one}" if one in "\"'" else one for one in joined)


def _nested(script: Script, words: list[str], depth: int) -> bool:
    """Read the script that a command starts: `bash -c '...'`, whose own shell replaces the exported
    variables, or a file beside the script with its arguments.  The options before it are those of
    each of its commands."""
    start = next((index for index, word in enumerate(words) if word in SHELLS), -1)
    if start < 0 and (words[0] in LAUNCHERS or words[0].endswith(".sh")):
        start = next((index - 1 for index, word in enumerate(words) if word.endswith(".sh")), -1)
    rest = words[start + 1 :]
    if not rest or not depth or (start < 0 and not words[0].endswith(".sh")):
        return False
    first = expand_text(rest[0], script.variables)
    beside = Path(script.file).parent / Path(first).name
    if first.startswith("-") and "c" in first and rest[1:]:
        text = expand_text(rest[1], script.variables)
    elif first.endswith(".sh") and beside.is_file():
        text = read_text(beside, str(beside))
        arguments = [one for word in rest[1:] for one in expand_words(word, script.variables)]
        script.variables |= {str(number): [one] for number, one in enumerate(arguments, 1)}
        script.variables |= {"@": arguments, "#": [str(len(arguments))]}
    else:
        return False
    before = [one for word in words[: start + 1] for one in expand_words(word, script.variables)]
    inner = Script(file=script.file, variables=script.variables, documents=script.documents)
    try:
        _read(inner, text, Path(script.file).parent, depth - 1)
    except ConfigError:  # quotes that only one of the two shells removes
        return False
    script.commands += [before + command for command in inner.commands]
    script.undecided += inner.undecided
    return True


def _assign(script: Script, words: list[str]) -> list[str]:
    """Set the variables at the beginning of a statement; the words after them.  ConfigError for a
    variable that grows without end."""
    declares = words[0] in DECLARATIONS
    words = [word for word in words[declares:] if not (declares and word.startswith("-"))]
    while words and (match := ASSIGNMENT.fullmatch(words[0])):
        values = assigned(match[3], script.variables, script.file)
        if match[2]:
            before = script.variables.get(match[1], [])
            joined = match[3].startswith("(") or not before
            values = before + values if joined else [*before[:-1], before[-1] + values[0]]
        if sum(map(len, values)) > LONGEST:
            raise ConfigError(script.file, "", "not a shell command (a variable has no end)")
        script.variables[match[1]] = values
        words = words[1:]
    return words


def _run(script: Script, words: list[str], document: str, depth: int) -> None:
    """Set the variables of a statement, or add its command."""
    words = _assign(script, words)
    if not words:
        return
    if words[0] == "read" and document:
        script.variables[words[-1]] = [expand_text(_quoted(document), script.variables)]
        return
    if _nested(script, words, depth):
        return
    command = [one for word in words for one in expand_words(word, script.variables)]
    if document:
        target = re.search(r">+\s*(\S+)", " ".join(command))
        if target:
            text = expand_text(_quoted(document), script.variables)
            script.documents[Path(target[1]).name] = text
    elif command[:1] and command[0].startswith("--") and script.commands:
        script.commands[-1] += command  # a comment in a continued command
    elif command:
        script.commands.append(command)
