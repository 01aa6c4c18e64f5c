"""The commands of a shell script, with the values of its variables.  Nothing is executed.

`shfmt` gives the syntax tree.  This module follows assignments (also arrays, `+=` and defaults
`${X:-8}`), calculations `$((A*B))`, `if` and `case` over values that the script sets, functions,
files that the script sources from its own folder, and here-documents.  An argument (`$1`), a
variable of the environment and the output of every command except `expr` are empty, in conditions
too.  A test of a file counts as false, also if it is negated, and so does a command.
"""

import fnmatch
import json
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

from rematbench.foreign.reading import Options, named_file
from rematbench.foreign.shell_values import (
    OPERATIONS,
    Node,
    Variables,
    calculate,
    expand_document,
    expand_text,
    expand_words,
)
from rematbench.inputs.configfile import ConfigError, read_text

SBATCH = re.compile(r"^#SBATCH\s+([^#\n]*)", re.MULTILINE)
SLURM = {
    "nodes": ("SLURM_NNODES", "SLURM_JOB_NUM_NODES"),
    "ntasks-per-node": ("SLURM_NTASKS_PER_NODE",),
    "gpus-per-node": ("SLURM_GPUS_ON_NODE", "SLURM_GPUS_PER_NODE"),
}
"""Variables that Slurm sets from the headers of a job (sbatch's manual page)."""
SHORT = {r"(?<!\S)-N[ =]?": "--nodes=", r"(?<!\S)-n[ =]?": "--ntasks="}
COMPARED = {"-eq": "==", "-ne": "!=", "-gt": ">", "-ge": ">=", "-lt": "<", "-le": "<="}
SHELLS = {"bash", "sh", "/bin/bash", "/bin/sh"}
LAUNCHERS = {"srun", "nohup"}
PROGRAM = re.compile(r"(^|/)(python[\d.]*|torchrun|accelerate|deepspeed|bash|sh|env)$|\.(sh|py)$")
"""A word with which the program of a launcher begins."""
ENDS = {"|", "||", "&&", "&", ";"}
"""The words that end a command in a text that `eval` starts."""
PREFIXES = {"eval", "exec"}
"""Words before a command that have no effect on what it starts."""
GPUS = re.compile(r"(?:[a-zA-Z][\w.-]*:)*(\d+)(?:\([^)]*\))?(?:,.*)?")
"""A number of GPUs, also with their kind (`gpu:a100:8`)."""
DEPTH = 8
"""The most files and functions that may be entered inside each other."""
LONGEST = 1 << 20
"""The most characters of a variable."""


class Script(Struct):
    """A script while it is read: what it sets, starts and writes, and what stays unknown."""

    file: str
    variables: Variables = {}
    functions: dict[str, Node] = {}
    commands: list[list[str]] = []
    """The commands that it starts, each a list of words."""
    documents: dict[str, str] = {}
    """Its here-documents, by the name of the file into which they are written."""
    headers: Options = {}
    """The options of its Slurm headers."""
    undecided: list[str] = []
    """Conditions on values that the script does not set."""
    loops: list[str] = []
    """Loops of which only the first value is read, in words."""
    absent: list[str] = []
    """Scripts that it sources and that are not found."""
    text: bytes = b""
    """The text that is being read."""
    depth: int = DEPTH
    """How many files and functions may still be entered inside each other."""


def read_script(text: str, file: str, variables: Variables | None = None) -> Script:
    """The commands of a script; `variables`: those of the environment.  ConfigError if the text is
    not a shell script."""
    script = Script(file=file, variables={"#": ["0"], **(variables or {})})
    headers = " ".join(SBATCH.findall(text))
    for short, option in SHORT.items():
        headers = re.sub(short, option, headers)
    script.headers = options_of(shlex.split(headers))
    for option in ("gpus-per-node", "gres"):
        if gpus := GPUS.fullmatch(" ".join(script.headers.get(option, []))):
            script.headers["gpus-per-node"] = [gpus[1]]
            break
    for option, names in SLURM.items():
        for name in names if script.headers.get(option) else ():
            script.variables[name] = script.headers[option][-1:]
    _read(script, text)
    return script


def options_of(words: list[str]) -> Options:
    """The options among words, each with its values.  The last of two equal options counts;
    redirections are left out."""
    options: Options = {}
    values: list[str] = []
    skipped = False
    for word in words:
        if skipped:
            skipped = False
        elif word in ENDS:
            break
        elif redirection := re.fullmatch(r"(?:\d|&)?[<>]+(.*)", word):
            skipped = not redirection[1]
        elif re.match(r"--\w", word):
            name, equals, value = word[2:].partition("=")
            values = options[name] = [value] if value else []
            values = [] if equals else values  # `--name=value` has exactly one value
        else:
            values.append(word)
    return options


def syntax_tree(text: str, file: str) -> list[Node]:
    """The statements of a text as bash parses it.  ConfigError if it is not a shell script, or
    without the program shfmt."""
    beside = Path(sys.executable).with_name("shfmt")
    program = str(beside) if beside.is_file() else shutil.which("shfmt")
    if program is None:
        raise ConfigError(file, "", "shfmt reads shell scripts: python -m pip install shfmt-py")
    done = subprocess.run(
        [program, "--to-json", "--language-dialect", "bash"],
        input=text.encode(),
        capture_output=True,
        check=False,
    )
    if done.returncode:
        line, _, problem = done.stderr.decode().strip().partition(":")
        problem = problem.partition(": ")[2].split(chr(10))[0]
        raise ConfigError(file, "", f"not a shell command (line {line}: {problem})")
    try:
        statements: list[Node] = json.loads(done.stdout).get("Stmts", [])
    except RecursionError as error:
        raise ConfigError(file, "", "not a shell command (nested too deeply)") from error
    return statements


def _read(script: Script, text: str) -> None:
    """Run the statements of a text.  A backslash before spaces at the end of a line continues it
    here, which bash would not do.  `[1]*48`, which shfmt takes for an index, is quoted."""
    text = re.sub(r"\\[ \t]*\n", "\\\n", text.replace("\r", ""))
    text = re.sub(r"(?<=\s)\[[01]\]\*[^\s)]+", r"'\g<0>'", text)
    before, script.text = script.text, text.encode()
    _run(script, syntax_tree(text, script.file))
    script.text = before


def _run(script: Script, statements: Iterable[Node]) -> bool | None:
    """Run statements in order; the value of the last one as a condition (None: not decided)."""
    value: bool | None = None
    for statement in statements:
        node = {"Type": "Redirection", **statement, **statement.get("Cmd", {})}
        value = KINDS[node["Type"]](script, node) if node["Type"] in KINDS else None
        if statement.get("Negated") and value is not None:
            value = not value
    return value


def _calculated(script: Script, node: Node) -> bool | None:
    values = [calculate(tree, script.variables) for tree in node.get("Exprs", [node.get("X")])]
    return values[-1] not in ("", "0")


def _function(script: Script, node: Node) -> bool | None:
    script.functions[node["Name"]["Value"]] = node["Body"]
    return None


def _if(script: Script, node: Node) -> bool | None:
    if "Cond" not in node or _run(script, node["Cond"]):
        return _run(script, node["Then"])
    return _if(script, node["Else"]) if "Else" in node else None


def _while(script: Script, node: Node) -> bool | None:
    """Run the body of a loop once, if its condition holds."""
    if bool(_run(script, node["Cond"])) != bool(node.get("Until")):
        _run(script, node["Do"])
    return None


def _for(script: Script, node: Node) -> bool | None:
    """Run the body of a loop once, with its first word."""
    loop = node["Loop"]
    if loop["Type"] == "WordIter":
        items = [text for word in loop.get("Items", ()) for text in _words(script, [word])]
        script.variables[name := loop["Name"]["Value"]] = items[:1]
        if len(items) > 1:
            script.loops.append(f"{name} is {items[0]}, the first of {len(items)} values")
    elif "Init" in loop:
        calculate(loop["Init"], script.variables)
    _run(script, node["Do"])
    return None


def _joined(script: Script, node: Node) -> bool | None:
    """Run both sides of `&&`, `||` or `|`; only the left side if it decides."""
    decides = {"&&": False, "||": True}.get(node["Op"])
    left = _run(script, [node["X"]])
    if decides is not None and left is decides:
        return left
    right = _run(script, [node["Y"]])
    if decides is None or right is decides:
        return right
    return None if left is None else right


def _case(script: Script, node: Node) -> bool | None:
    value = _text(script, node["Word"])
    for item in node.get("Items", ()):
        patterns = [_text(script, word) for word in item["Patterns"]]
        if any(fnmatch.fnmatchcase(value, pattern) for pattern in patterns):
            return _run(script, item.get("Stmts", ()))
    return None


def _test(script: Script, node: Node) -> bool | None:
    return _tested(script, node["X"], _source(script, node))


def _source(script: Script, node: Node) -> str:
    return script.text[node["Pos"]["Offset"] : node["End"]["Offset"]].decode()


def _tested(script: Script, node: Node, source: str) -> bool | None:
    """The value of a part of `[[ ... ]]` as a condition; None for a test of a file."""
    sign = node.get("Op")
    if node["Type"] == "Word":
        return bool(_text(script, node))
    if sign in ("&&", "||"):
        sides = [bool(_tested(script, node[side], source)) for side in ("X", "Y")]
        return all(sides) if sign == "&&" else any(sides)
    if node["Type"] == "BinaryTest":
        return _compared(script, node, source)
    value = _tested(script, node["X"], source)
    if sign is None or sign in ("-n", "-z"):  # parentheses, or a test whether a text is empty
        return value == (sign != "-z")
    return not value if sign == "!" and value is not None else None


def _compared(script: Script, node: Node, source: str) -> bool:
    sign = str(node["Op"])
    left, right = (_text(script, node[side]) for side in ("X", "Y"))
    if not left and right:
        script.undecided.append(source)
    if sign == "=~":
        try:
            return re.search(right, left) is not None
        except re.error:
            return False
    if sign in COMPARED:
        numbers = left.isdigit() and right.isdigit()
        return numbers and bool(OPERATIONS[COMPARED[sign]](int(left), int(right)))
    return fnmatch.fnmatchcase(left, right) == (sign != "!=")


def _test_tree(words: list[Node], texts: list[str]) -> Node:
    """The words of `[ ... ]` as the tree of the equal `[[ ... ]]`; an empty word if there are
    none."""
    for sign, joined in (("-o", "||"), ("-a", "&&")):
        if sign in texts[1:-1]:
            at = texts.index(sign, 1)
            sides = (
                _test_tree(words[part], texts[part]) for part in (slice(at), slice(at + 1, None))
            )
            return {"Type": "BinaryTest", "Op": joined, **dict(zip("XY", sides, strict=True))}
    if len(words) == 2 or texts[:1] == ["!"]:
        return {"Type": "UnaryTest", "Op": texts[0], "X": _test_tree(words[1:], texts[1:])}
    if len(words) == 3:
        return {"Type": "BinaryTest", "Op": texts[1], "X": words[0], "Y": words[2]}
    return {"Type": "Word", "Parts": words[0]["Parts"] if words else []}


def _words(script: Script, words: Iterable[Node]) -> list[str]:
    return [
        text for word in words for text in expand_words(_echoed(script, word), script.variables)
    ]


def _text(script: Script, word: Node | None) -> str:
    return expand_text(word and _echoed(script, word), script.variables)


def _echoed(script: Script, node: Node) -> Node:
    """A word whose `$(...)` are replaced by what they print, if they only test and echo
    (`$([ $A = 1 ] && echo --b)`); what other commands print is not known."""
    if node.get("Type") != "CmdSubst":
        parts = node.get("Parts", ())
        return {**node, "Parts": [_echoed(script, part) for part in parts]} if parts else node
    shell = replace(script, commands=[], variables=dict(script.variables))
    _run(shell, node.get("Stmts", ()))
    if not shell.commands or any(words[0] != "echo" for words in shell.commands):
        return node
    text = " ".join(word for words in shell.commands for word in words[1:])
    return {"Type": "Lit", "Value": text.replace("\\", "\\\\")}


def _declare(script: Script, node: Node) -> bool | None:
    _assign(script, node.get("Args", ()))
    return None


def _assign(script: Script, assignments: Iterable[Node]) -> None:
    """Set variables.  ConfigError for one that grows without end."""
    for node in assignments:
        if node.get("Naked"):
            continue
        name = node["Name"]["Value"]
        values = [_text(script, node.get("Value"))]
        if "Array" in node:
            elements = node["Array"].get("Elems", ())
            keyed = ({"Name": node["Name"], **part} for part in elements if "Index" in part)
            _assign(script, keyed)
            values = _words(script, (part["Value"] for part in elements))
        if "Index" in node:
            name += f"[{_text(script, node['Index'])}]"
        if node.get("Append"):
            before = script.variables.get(name, [])
            joined = "Array" in node or not before
            values = before + values if joined else [*before[:-1], before[-1] + values[0]]
        if sum(map(len, values)) > LONGEST:
            raise ConfigError(script.file, "", "not a shell command (a variable grows without end)")
        script.variables[name] = values


def _call(script: Script, node: Node) -> bool | None:
    """Set the variables before a command, and run the command. Returns the value of a test."""
    _assign(script, node.get("Assigns", ()))
    words = [_echoed(script, word) for word in node.get("Args", [])]
    texts = [expand_text(word, script.variables) for word in words]
    while texts and texts[0] in PREFIXES:
        words, texts = words[1:], texts[1:]
    if not texts:
        return None
    if texts[0] in ("[", "test"):
        inside = slice(1, -1 if texts[0] == "[" else None)
        return _tested(script, _test_tree(words[inside], texts[inside]), _source(script, node))
    if texts[0] in ("true", "false"):
        return texts[0] == "true"
    written = _document(script, texts, node.get("Redirs", ()))
    if not written and not _entered(script, words, texts):
        command = _words(script, words)
        if command[:1] and command[0].startswith("--") and script.commands:
            script.commands[-1] += command  # a comment cut the command in two
        elif command:
            script.commands.append(_long_nodes(command) if command[0] == "srun" else command)
    return None


def _long_nodes(command: list[str]) -> list[str]:
    """A command of srun with its option -N as --nodes; the options of its program stay."""
    ends = (at for at, word in enumerate(command) if at and PROGRAM.search(word))
    end = next(ends, len(command))
    words = [re.sub(r"^-N(?:$|=?(?=\d))", "--nodes=", word) for word in command[:end]]
    return [*(word.removesuffix("=") for word in words), *command[end:]]


def _document(script: Script, texts: list[str], redirections: Iterable[Node]) -> bool:
    """Keep the here-document of a command, which it reads into a variable or writes to a file."""
    documents = [node["Hdoc"] for node in redirections if "Hdoc" in node]
    for document in documents:
        text = expand_document(document, script.variables)
        if texts[0] == "read":
            script.variables[texts[-1]] = [text]
        for target in redirections:
            if target["Op"] in (">", ">>"):
                name = Path(_text(script, target["Word"])).name
                script.documents[name] = text
    return bool(documents)


def _entered(script: Script, words: list[Node], texts: list[str]) -> bool:
    """Run what a command starts: a function, a script beside this one (sourced, or started with
    arguments), or `bash -c '...'`.  Return whether it did so.  The options before it
    are given to each of its commands."""
    if not script.depth:
        return False
    if texts[0] in script.functions:
        before = {key: value for key, value in script.variables.items() if not key.isidentifier()}
        _arguments(script, words[1:])
        script.depth -= 1
        _run(script, [script.functions[texts[0]]])
        script.depth += 1
        script.variables |= before
        return True
    start = next((index for index, text in enumerate(texts) if text in SHELLS), -1)
    if start < 0 and (texts[0] in LAUNCHERS or texts[0].endswith(".sh")):
        start = next((index - 1 for index, text in enumerate(texts) if text.endswith(".sh")), -1)
    sources = texts[0] in (".", "source")
    start = 0 if sources else start
    rest = texts[start + 1 :]
    if not rest or (start < 0 and not texts[0].endswith(".sh")):
        return sources
    beside = named_file(script.file, rest[0])
    if not sources and rest[0].startswith("-") and "c" in rest[0] and rest[1:]:
        text = rest[1]
    elif (sources or rest[0].endswith(".sh")) and beside.is_file():
        text = read_text(beside, str(beside))
        if not sources:
            _arguments(script, words[start + 2 :])
    else:
        script.absent += rest[:1] if sources and rest[0].endswith(".sh") else []
        return sources
    options = [] if sources else _words(script, words[: start + 1])
    outer, script.commands = script.commands, []
    script.depth -= 1
    try:
        _read(script, text)
    except ConfigError:  # the inner text has other quotes than its own shell sees
        if sources:
            raise
        return False
    finally:
        script.depth += 1
        inner, script.commands = script.commands, outer
    script.commands += [options + command for command in inner]
    return True


def _arguments(script: Script, words: list[Node]) -> None:
    arguments = _words(script, words)
    script.variables |= {str(number): [text] for number, text in enumerate(arguments, 1)}
    script.variables |= {"@": arguments, "#": [str(len(arguments))]}


def _group(script: Script, node: Node) -> bool | None:
    return _run(script, node.get("Stmts", [node["Stmt"]] if "Stmt" in node else ()))


KINDS: dict[str, Callable[[Script, Node], bool | None]] = {
    "ArithmCmd": _calculated,
    "BinaryCmd": _joined,
    "Block": _group,
    "CallExpr": _call,
    "CaseClause": _case,
    "DeclClause": _declare,
    "ForClause": _for,
    "FuncDecl": _function,
    "IfClause": _if,
    "LetClause": _calculated,
    "Subshell": _group,
    "TestClause": _test,
    "TimeClause": _group,
    "WhileClause": _while,
}
"""The function that runs each kind of statement and returns its value as a condition."""
