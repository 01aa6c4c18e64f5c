"""The content of a training package's file: values of a job, and the keys that were not read."""

from pathlib import Path
from typing import Any

from msgspec import Struct

from rematbench.inputs.configfile import ConfigError


class Reading(Struct, kw_only=True):
    """What was read from one file, or from several that are merged."""

    file: str
    package: str
    values: dict[str, Any] = {}
    """Values of the job: fields of Job, and terms from which job.py derives fields (nodes, ...)."""
    keys: dict[str, str] = {}
    """The key of the file from which each value comes."""
    model: dict[str, Any] = {}
    """Fields of Model."""
    facts: dict[str, Any] = {}
    """Facts of the stack."""
    system: str = ""
    """The shipped stack that stands for the package."""
    method: tuple[str, dict[str, Any]] | None = None
    """The method and its settings (None: the file does not say)."""
    ignored: list[str] = []
    """Keys without an effect on bytes or seconds."""
    unknown: list[str] = []
    """Keys that are not read."""
    refused: list[str] = []
    """Settings that are not modelled, each with the reason."""
    notes: list[str] = []
    assumed: list[str] = []
    """What the files leave open, with the reading that is taken."""
    files: list[Path] = []
    """Files that the file names."""
    command: bool = False
    """Whether this is a command line, whose values replace those of the files that it names."""

    def put(self, name: str, value: Any, key: str) -> None:
        """Set a value of the job, and remember the key that it comes from."""
        self.values[name] = value
        self.keys[name] = key

    def get(self, name: str, default: Any = None) -> Any:
        """A value of the job, or `default` if the file does not have it."""
        return self.values.get(name, default)


def named_file(file: str | Path, named: object) -> Path:
    """The file that another file names: its path is tried from that file's folder, then from each
    folder above (a command may start there), then without its first parts, as these may be a
    variable.  If no such file exists: its name in that file's folder."""
    folder, path = Path(file).parent, Path(str(named))
    above = folder.resolve().parents if path.parent.name else ()
    ends = (Path(*path.parts[start:]) for start in range(1, len(path.parts)))
    places = [folder / path, *(place / path for place in above), *(folder / end for end in ends)]
    return next((place for place in places if place.is_file()), folder / path.name)


Options = dict[str, list[str]]
"""The options of a launch line, each with its values."""


def first_value(options: Options, name: str, default: str = "") -> str:
    """The first value of an option, or `default` if the line does not have one."""
    return (options.get(name) or [default])[0]


AUTO = "auto"
"""A value that the trainer fills in."""


def whole(value: Any, file: str, key: str) -> int:
    """A positive whole number; ConfigError for any other value."""
    try:
        number = int(value)
    except (TypeError, ValueError):
        number = 0
    if isinstance(value, bool) or number < 1 or number != float(value):
        raise ConfigError(file, key, f"{value!r} is not a positive whole number")
    return number


def number(value: Any, file: str, key: str) -> float:
    """A number; ConfigError for any other value."""
    try:
        return float(value)
    except (TypeError, ValueError) as error:
        raise ConfigError(file, key, f"{value!r} is not a number") from error


def switch(value: Any, file: str, key: str) -> bool:
    """A switch; ConfigError for a value that is neither on nor off."""
    word = str(value).strip().lower()
    if word in {"true", "yes", "on", "1"}:
        return True
    if word in {"false", "no", "off", "0", "none"}:
        return False
    raise ConfigError(file, key, f"{value!r} is not a switch (allowed: true, false)")


def inputs_at(*, split: bool, host: bool) -> str:
    """The place of layers' inputs, as a setting of full recomputation."""
    return ("shared" * split + "_host" * host).strip("_")
