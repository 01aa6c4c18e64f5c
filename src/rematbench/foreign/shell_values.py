"""Replaces the variables in the words of bash's syntax tree by their values.

Source of the rules: POSIX.1-2017, Shell Command Language, 2.6 Word Expansions; arrays and
calculations as in bash.  Source of the tree: shfmt 3 (`--to-json`), mvdan.cc/sh/v3/syntax.
"""

import operator
import re
import shlex
from collections.abc import Callable
from typing import Any

Node = dict[str, Any]
"""A node of the syntax tree."""
Variables = dict[str, list[str]]
"""The values of the variables; an array has several, an entry of a map is `NAME[KEY]`."""
OPERATIONS: dict[str, Callable[[int, int], int]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": operator.floordiv,
    "%": operator.mod,
    "**": operator.pow,
    ">": operator.gt,
    ">=": operator.ge,
    "<": operator.lt,
    "<=": operator.le,
    "==": operator.eq,
    "!=": operator.ne,
    "&&": lambda left, right: bool(left and right),
    "||": lambda left, right: bool(left or right),
}
SIGNS: dict[str, Callable[[int], int]] = {
    "-": operator.neg,
    "+": operator.pos,
    "!": operator.not_,
}
LARGEST = 1 << 62


def expand_text(word: Node | None, variables: Variables) -> str:
    """The value of a word as one text."""
    return " ".join(_pieces((word or {}).get("Parts", ()), variables))


def expand_words(word: Node, variables: Variables) -> list[str]:
    """The words to which a word expands: an array, or a variable with spaces, gives several.  A
    quoted text with options (`"--split 1,2"`, `bash -c "... --lr 1"`) is split as well."""
    quoted = word["Parts"][0]["Type"] in ("SglQuoted", "DblQuoted")
    words = []
    for piece in _pieces(word["Parts"], variables):
        several = not quoted or piece.lstrip().startswith("--") or " --" in piece
        words += _split(piece) if several and re.search(r"\s", piece) else [piece]
    return [text for text in words if text]


def _split(text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError:
        return text.split()


def _pieces(parts: list[Node], variables: Variables, *, quoted: bool = False) -> list[str]:
    """The texts to which the parts of a word expand: one, or one per value of an array in it."""
    pieces = [""]
    for part in parts:
        if part["Type"] == "Lit":  # a backslash in quotes escapes these characters alone
            escaped = r'\\([$`"\\])' if quoted else r"\\(.)"
            values = [re.sub(escaped, r"\1", part["Value"])]
        elif part["Type"] == "SglQuoted":
            values = [part.get("Value", "")]
        elif part["Type"] == "DblQuoted":
            values = _pieces(part.get("Parts", ()), variables, quoted=True)
        elif part["Type"] == "ParamExp":
            values = _parameter(part, variables)
        elif part["Type"] == "ArithmExp":
            values = [calculate(part["X"], variables)]
        else:
            values = _output(part, variables)
        first, *others = values or [""]
        pieces[-1] += first
        pieces += others
    return pieces


def _output(part: Node, variables: Variables) -> list[str]:
    """The output of `expr A * B - C`, whose operators are those of a calculation; the output of
    other commands is empty."""
    calls = [(statement.get("Cmd") or {}).get("Args", ()) for statement in part.get("Stmts", ())]
    words = [word for call in calls for one in call for word in expand_words(one, variables)]
    text = " ".join(words[1:])
    try:
        for signs in ("[*/%]", "[-+]", "[<>=!&|]+"):
            while found := re.search(rf"(-?\d+) ({signs}) (-?\d+)", text):
                value = OPERATIONS[found[2]](int(found[1]), int(found[3]))
                text = f"{text[: found.start()]}{value:d}{text[found.end() :]}"
    except (KeyError, ZeroDivisionError):
        return []
    return [text] if words[:1] == ["expr"] and re.fullmatch(r"-?\d+", text) else []


def expand_document(document: Node, variables: Variables) -> str:
    """The text of a here-document, in which quotes are plain."""
    return " ".join(_pieces(document.get("Parts", ()), variables, quoted=True))


def _parameter(part: Node, variables: Variables) -> list[str]:
    """The values of `$NAME`, `${NAME[KEY]}`, `${#NAME}` or `${NAME:-default}`."""
    name = part["Param"]["Value"]
    values = variables.get(name, [])
    key = expand_text(part.get("Index"), variables)
    if f"{name}[{key}]" in variables:
        values = variables[f"{name}[{key}]"]
    elif key.isdigit():
        values = values[int(key) : int(key) + 1]
    if part.get("Length"):
        return [str(len(values) if key else len(" ".join(values)))]
    sign, word = part.get("Exp", {}).get("Op", ""), part.get("Exp", {}).get("Word")
    if sign.endswith("+"):
        return [expand_text(word, variables)] if any(values) else []
    if any(values) or sign not in ("-", ":-", "=", ":="):
        return values
    default = expand_text(word, variables)
    if sign.endswith("="):
        variables[name] = [default]
    return [default]


def calculate(node: Node, variables: Variables) -> str:
    """The value of a calculation of whole numbers; empty if it has none."""
    try:
        return str(int(_number(node, variables)))
    except (KeyError, ValueError, ZeroDivisionError, RecursionError):
        return ""


def _number(node: Node, variables: Variables) -> int:
    """The value of a tree of whole numbers; ValueError or KeyError for anything else."""
    if node["Type"] == "Word":
        text = expand_text(node, variables)
        text = " ".join(variables.get(text, ["0"])) if text.isidentifier() else text
        return int(text, 0)
    if node["Type"] == "ParenArithm":
        return _number(node["X"], variables)
    if node["Type"] == "UnaryArithm":
        return SIGNS[node["Op"]](_number(node["X"], variables))
    if node["Op"] == "?":
        chosen = "X" if _number(node["X"], variables) else "Y"
        return _number(node["Y"][chosen], variables)
    if node["Op"].endswith("=") and node["Op"] not in OPERATIONS:
        plain = node["Op"] == "="
        changed = node["Y"] if plain else {**node, "Op": node["Op"][:-1]}
        value = _number(changed, variables)
        variables[expand_text(node["X"], {})] = [str(value)]
        return value
    left, right = _number(node["X"], variables), _number(node["Y"], variables)
    if node["Op"] == "**" and not 0 <= right <= 64:
        raise ValueError("a power that is too large")
    value = OPERATIONS[node["Op"]](left, right)
    if abs(value) > LARGEST:
        raise ValueError("a number that is too large")
    return value
