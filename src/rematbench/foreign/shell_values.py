"""Replaces the variables of a shell script by their values.

Source of the rules: POSIX.1-2017, Shell Command Language, 2.6 Word Expansions; arrays as in bash.
"""

import ast
import operator
import re
import shlex
from collections.abc import Callable

from rematbench.foreign.shell_words import split_words

Variables = dict[str, list[str]]
"""The values of the variables; an array has several."""
BRACED = re.compile(r"!?([A-Za-z_]\w*|\d+)(?:\[[^\]]*\])?(?:(:?[-=?+])(.*))?", re.DOTALL)
PLAIN = re.compile(r"\$([A-Za-z_]\w*|[0-9@*#?$!-])")
OPERATIONS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}
COMPARISONS: dict[type[ast.cmpop], Callable[[int, int], bool]] = {
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
}
LARGEST = 1 << 62
LONGEST = 1 << 20
"""The characters of a variable, at most."""
ESCAPED = '$`"\\\n'
"""The characters that a backslash escapes inside double quotes."""


def expand_text(word: str, variables: Variables) -> str:
    """The value of a word as one text."""
    return " ".join(_pieces(word, variables))


def expand_words(word: str, variables: Variables) -> list[str]:
    """The words that a word stands for: an array or a variable with several words gives several.
    A quoted text with options (`"--split 1,2"`, `bash -c "... --lr 1"`) is split as well."""
    quoted = word[:1] in "\"'"
    words = []
    for piece in _pieces(word, variables):
        several = not quoted or piece.lstrip().startswith("--") or " --" in piece
        words += _split(piece) if several and re.search(r"\s", piece) else [piece]
    return [one for one in words if one]


def _split(text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError:
        return text.split()


def _pieces(word: str, variables: Variables) -> list[str]:
    """The texts of a word: as many as the array in it has values."""
    pieces, position, quoted = [""], 0, False
    while position < len(word):
        one = word[position]
        if one == '"':
            quoted, position = not quoted, position + 1
        elif one == "'" and not quoted:
            end = word.find("'", position + 1)
            end = len(word) if end < 0 else end
            pieces[-1] += word[position + 1 : end]
            position = end + 1
        elif one == "\\":
            following = word[position + 1 : position + 2]
            kept = quoted and following not in ESCAPED
            pieces[-1] += one + following if kept else following.strip("\n")
            position += 2
        elif one == "`":
            position = word.find("`", position + 1) % len(word) + 1
        elif one == "$":
            values, position = _reference(word, position, variables)
            first, *others = values or [""]
            pieces[-1] += first
            pieces += others
        else:
            pieces[-1] += one
            position += 1
    return pieces


def _reference(word: str, position: int, variables: Variables) -> tuple[list[str], int]:
    """The values of the variable at a position, and the position after it."""
    if word.startswith("$((", position):
        end = _closing(word, position + 1)
        return [_calculated(word[position + 3 : end - 2], variables)], end
    if word.startswith("$(", position):
        return [], _closing(word, position + 1)  # the output of a command
    if word.startswith("${", position):
        end = _closing(word, position + 1)
        return _braced(word[position + 2 : end - 1], variables), end
    match = PLAIN.match(word, position)
    if match is None:
        return ["$"], position + 1
    return variables.get(match[1], []), match.end()


def _closing(word: str, position: int) -> int:
    """The position after the bracket that closes the one at a position."""
    opening = word[position]
    closing = {"(": ")", "{": "}"}[opening]
    depth = 0
    for index in range(position, len(word)):
        depth += (word[index] == opening) - (word[index] == closing)
        if not depth:
            return index + 1
    return len(word)


def _braced(text: str, variables: Variables) -> list[str]:
    match = BRACED.match(text)
    if match is None:
        return []
    name, sign, word = match[1], match[2] or "", match[3] or ""
    values = variables.get(name, [])
    if sign.endswith("+"):
        return [expand_text(word, variables)] if any(values) else []
    if any(values) or not sign or sign.endswith("?"):
        return values
    default = expand_text(word, variables)
    if sign.endswith("="):
        variables[name] = [default]
    return [default]


def _calculated(text: str, variables: Variables) -> str:
    """The value of an expression of whole numbers; empty if it has none."""
    plain = re.sub(
        r"[A-Za-z_]\w*", lambda m: " ".join(variables.get(m[0], ["0"])), _plain(text, variables)
    )
    try:
        choice = re.fullmatch(r"(.+)\?(.+):(.+)", plain, re.DOTALL)
        if choice:
            plain = f"({choice[2]}) if ({choice[1]}) else ({choice[3]})"
        tree = ast.parse(plain.strip().replace("/", "//"), mode="eval")
        return str(_number(tree.body))
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):
        return ""


def _plain(text: str, variables: Variables) -> str:
    return " ".join(_pieces(text, variables))


def _number(node: ast.expr) -> int:
    """The value of a tree of whole numbers; ValueError for anything else."""
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_number(node.operand)
    if isinstance(node, ast.IfExp):
        return _number(node.body if _number(node.test) else node.orelse)
    if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in COMPARISONS:
        compared = COMPARISONS[type(node.ops[0])]
        return int(compared(_number(node.left), _number(node.comparators[0])))
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATIONS:
        left, right = _number(node.left), _number(node.right)
        if isinstance(node.op, ast.Pow) and not 0 <= right <= 64:
            raise ValueError("a power that is too large")
        value = OPERATIONS[type(node.op)](left, right)
        if abs(value) > LARGEST:
            raise ValueError("a number that is too large")
        return value
    raise ValueError("not a calculation of whole numbers")


def assigned(value: str, variables: Variables, file: str) -> list[str]:
    """The values that an assignment sets: several for an array."""
    if value.startswith("("):
        return [
            one for word in split_words(value[1:-1], file) for one in expand_words(word, variables)
        ]
    return [expand_text(value, variables)]
