"""Finding methods and giving them parameters: every mistake is one clear line."""

import re
from pathlib import Path
from typing import Any

import pytest

from rematbench.plan import Plan, Unsupported
from rematbench.plugins.discover import discover
from rematbench.plugins.registry import MethodError, Registry
from tests.method_files import method_file
from tests.problems import problem
from tests.tables import tables

GOOD = method_file(
    "mine",
    "return base.with_rules(Rule(Select(activations=self.names), Recompute()))",
    does="drop the queries",
    fields='names: tuple[str, ...] = ("q",)\nshare: float = 0.5',
)
BROKEN = {
    "syntax": ("def plan(:", "SyntaxError"),
    "import": ("import nowhere_to_be_found", "ModuleNotFoundError"),
    "raises": ("1 / 0", "ZeroDivisionError: division by zero"),
    "empty": ('"""nothing here"""', "no class with a `name`"),
    "class": ('"""d"""\nclass A:\n    name = "a"', "must be a msgspec Struct"),
    "thawed": (GOOD.replace("frozen=True, ", ""), "must be frozen"),
    "loose": (GOOD.replace(", forbid_unknown_fields=True", ""), "forbid unknown fields"),
    "planless": (GOOD.replace("def plan", "def plot"), "has no `plan(problem, base)`"),
    "silent": (re.sub('""".*?"""', "", GOOD, flags=re.DOTALL), "has no docstring"),
    "needy": (GOOD.replace("share: float = 0.5", "share: float"), "needs a default"),
    "taken": (GOOD.replace('"mine"', '"keep_all"'), "already defined by"),
}


def with_file(tmp_path: Path, text: str, name: str = "mine.py") -> Registry:
    (tmp_path / name).write_text(text)
    return discover([tmp_path])


def test_a_dropped_file_is_a_method(tmp_path: Path) -> None:
    registry = with_file(tmp_path, GOOD)
    assert registry.methods["mine"].parameters == {"names": ("q",), "share": 0.5}
    assert registry.methods["mine"].claim == "mine: drop the queries."
    plan = registry.resolve("mine+full_recompute").plan(problem())
    assert isinstance(plan, Plan)


@pytest.mark.parametrize("kind", BROKEN)
def test_a_broken_file_is_one_line_and_spares_the_others(tmp_path: Path, kind: str) -> None:
    text, words = BROKEN[kind]
    registry = with_file(tmp_path, text)
    (path, reason), *others = registry.broken.items()
    assert not others
    assert path == str(tmp_path / "mine.py")
    assert words in reason
    assert "\n" not in reason
    assert registry.resolve("keep_all")
    with pytest.raises(MethodError, match=r"unavailable: .*mine\.py"):
        registry.resolve("mine")


def test_a_missing_folder_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(MethodError, match="no such folder of methods"):
        discover([tmp_path / "nowhere"])


def test_equal_file_names_in_two_folders_do_not_mix(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    (tmp_path / "a" / "m.py").write_text(GOOD)
    (tmp_path / "b" / "m.py").write_text(GOOD.replace('"mine"', '"yours"'))
    registry = discover([tmp_path / "a", tmp_path / "b"])
    assert {"mine", "yours"} <= registry.methods.keys()


@pytest.mark.parametrize(("spec", "settings", "words"), tables(__file__)["wrong_words"])
def test_wrong_asks_name_what_would_be_right(
    spec: str, settings: dict[str, Any], words: str
) -> None:
    with pytest.raises(MethodError) as caught:
        discover().resolve(spec, settings)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_texts_become_typed_parameters() -> None:
    registry = discover()
    settings = {"alpha": ".25", "pp_offload.granularity": "1024", "fit": "paper"}
    made = registry.resolve("pp_offload", settings).parameters["pp_offload"]
    assert (made["alpha"], made["granularity"], made["fit"]) == (0.25, 1024, "paper")
    for names in ("q,k", "[q, k]", '["q", "k"]', ("q", "k")):
        chosen = registry.resolve("selective_recompute", {"activations": names})
        assert chosen.parameters["selective_recompute"]["activations"] == ["q", "k"]


def test_a_refusal_names_the_method() -> None:
    answer = discover().resolve("balanced_checkpointing+pp_offload").plan(problem())
    assert isinstance(answer, Unsupported)
    assert answer.reason.startswith("pp_offload: needs pp >= 3")


def test_an_ambiguous_parameter_asks_for_its_method(tmp_path: Path) -> None:
    text = GOOD.replace("share: float", "alpha: float")
    registry = with_file(tmp_path, text)
    with pytest.raises(MethodError, match=r"write mine\.alpha or pp_offload\.alpha"):
        registry.resolve("mine+pp_offload", {"alpha": 0.1})
    made = registry.resolve("mine+pp_offload", {"mine.alpha": 0.1}).parameters
    assert (made["mine"]["alpha"], made["pp_offload"]["alpha"]) == (0.1, None)


def test_settings_may_stand_in_the_name() -> None:
    found = discover().resolve("balanced_checkpointing:point=published+fc1+memo:alpha=.5")
    assert found.parameters["balanced_checkpointing"]["point"] == "published+fc1"
    assert found.parameters["memo"]["alpha"] == 0.5
    for spec, told in (
        ("memo:alpha", "expected METHOD:KEY=VALUE"),
        ("full_recompute:blok", "not 'blok'; did you mean 'full_recompute:block'"),
        ("full_recompute:blok 1", "not 'blok 1'; did you mean 'full_recompute:block'"),
        ("memo:alpha=1,alpha=0", "expected METHOD:KEY=VALUE"),
        ("balanced_checkpointing:point=al+memo", "invalid enum value 'al'"),
        ("memo:alph=1", "unknown parameter 'alph'"),
    ):
        with pytest.raises(MethodError, match=told):
            discover().resolve(spec)
    with pytest.raises(MethodError, match="set twice"):
        discover().resolve("memo:alpha=1", {"alpha": 0.5})


def test_a_grid_names_parameters_and_allowed_values(tmp_path: Path) -> None:
    for grid, told in (('{"nmaes": ()}', "in `grid`"), ('{"share": "x"}', "share")):
        text = GOOD.replace(
            "    names: tuple", f"    grid: ClassVar[tuple] = ({grid},)\n    names: tuple", 1
        )
        registry = with_file(tmp_path, text)
        assert told in next(iter(registry.broken.values()))
