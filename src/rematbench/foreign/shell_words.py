"""Splits a shell script into statements and words; quotes and variables stay in the words.

Source of the rules: POSIX.1-2017, Shell Command Language, 2.3 Token Recognition; arrays and `;;`
as in bash.
"""

import re
from collections.abc import Iterator

from msgspec import Struct

from rematbench.inputs.configfile import ConfigError

OPERATORS = (";;", "&&", "||", "\n", ";", "|", "&", "(", ")")
HERE = re.compile(r"(?<!<)<<(?!<)-?\s*(['\"]?)(\w+)\1")
CONTINUED = re.compile(r"\\[ \t]*\n")
"""A continued line, also with spaces after its backslash, which bash would not join."""
REDIRECTION = re.compile(r"[<>]&|&>")
CLOSING = {"(": ")", "{": "}"}


class Statement(Struct, frozen=True):
    """The words of one statement, the operator that ends it, and its here-document."""

    words: tuple[str, ...]
    end: str
    document: str = ""


def split_statements(text: str, file: str) -> Iterator[Statement]:
    """The statements of a script in order.  ConfigError for a quote or bracket without an end."""
    text, position = text.replace("\r", ""), 0
    words: list[str] = []
    pending: list[str] = []
    while position < len(text):
        if here := HERE.match(text, position):
            pending.append(here[2])
            position = here.end()
            continue
        operator = _operator(text, position)
        if not operator:
            word, position = _next_word(text, position, file)
            if word:
                words.append(word)
            continue
        position += len(operator)
        document = ""
        if operator == "\n":
            for delimiter in pending:
                document, position = _document(text, position, delimiter)
            pending = []
        yield Statement(tuple(words), operator, document)
        words = []
    yield Statement(tuple(words), "\n")


def split_words(text: str, file: str) -> list[str]:
    """The words of a text with several lines, as inside an array."""
    return [word for one in split_statements(text, file) for word in one.words]


def _operator(text: str, position: int) -> str:
    if REDIRECTION.match(text, position) or text[position - 1 : position] in (">", "<"):
        return ""
    return next((one for one in OPERATORS if text.startswith(one, position)), "")


def _document(text: str, position: int, delimiter: str) -> tuple[str, int]:
    end = re.compile(rf"^\t*{re.escape(delimiter)}\s*$", re.MULTILINE).search(text, position)
    if end is None:
        return text[position:], len(text)
    return text[position : end.start()], end.end()


def _next_word(text: str, start: int, file: str) -> tuple[str, int]:
    """The word at a position, and the position after it; an empty word for a space or comment."""
    if text[start] == "#":
        end = text.find("\n", start)
        return "", len(text) if end < 0 else end
    word, position = "", start
    while position < len(text):
        one = text[position]
        if joined := CONTINUED.match(text, position):
            position = joined.end()
            if not word:
                return "", position
            if text[position : position + 1].isspace():
                break
            continue
        if one in " \t":
            position += not word
            break
        if word and HERE.match(text, position):
            break
        array = one == "(" and bool(re.fullmatch(r"[A-Za-z_]\w*\+?=", word))
        if not array and position > start and _operator(text, position):
            break
        end = _end(text, position, file, array=array)
        word += text[position:end]
        position = end
    return word, position


def _end(text: str, position: int, file: str, *, array: bool = False) -> int:
    """The position after a character, or after the quotes or brackets that begin with it."""
    one = text[position]
    if one == "\\":
        return position + 2
    if one in "'`":
        return _index(text, one, position + 1, file) + 1
    if one == '"':
        return _after_quotes(text, position + 1, file)
    if array:
        return _after_bracket(text, position + 1, file, one)
    following = text[position + 1 : position + 2]
    if one == "$" and following in CLOSING:
        return _after_bracket(text, position + 2, file, following)
    return position + (2 if REDIRECTION.match(text, position) else 1)


def _index(text: str, sign: str, start: int, file: str) -> int:
    position = text.find(sign, start)
    if position < 0:
        line = text.count("\n", 0, start) + 1
        raise ConfigError(file, "", f"not a shell command (line {line}: no closing {sign})")
    return position


def _after_quotes(text: str, position: int, file: str) -> int:
    start = position
    while position < len(text):
        if text[position] == '"':
            return position + 1
        nested = text[position] in "\\`" or text.startswith(("$(", "${"), position)
        position = _end(text, position, file) if nested else position + 1
    return _index(text, '"', max(start, len(text)), file)


def _after_bracket(text: str, position: int, file: str, opening: str) -> int:
    """The position after the bracket that closes the open one; comments of an array are skipped."""
    depth, start = 1, position
    while position < len(text):
        one = text[position]
        if one == "#" and opening == "(" and text[position - 1].isspace():
            position = _index(text + "\n", "\n", position, file)
            continue
        if one in "\\\"'`" and not (one == "'" and opening == "{"):
            position = _end(text, position, file)
            continue
        depth += (one == opening) - (one == CLOSING[opening])
        position += 1
        if not depth:
            return position
    return _index(text, CLOSING[opening], max(start, len(text)), file)
