"""A command as a person types it, run in this process."""

import io
import sys
from contextlib import redirect_stderr, redirect_stdout
from typing import NamedTuple
from unittest.mock import patch

from rematbench.cli.app import main


class Ran(NamedTuple):
    """How it ended and what it printed."""

    code: int | str | None
    out: str
    err: str


def typed(*words: str) -> Ran:
    """Run `rematbench WORDS`; what is no exit escapes as the traceback that a person would see."""
    out, err = io.StringIO(), io.StringIO()
    code: int | str | None = None
    with patch.object(sys, "argv", ["started/as.py", *words]):
        try:
            with redirect_stdout(out), redirect_stderr(err):
                main()
        except SystemExit as exit_:
            code = exit_.code
    return Ran(code, out.getvalue(), err.getvalue())
