"""What the documentation says exists, and what is made from the code is current."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from weft.cli.exits import of_refusal
from weft.cli.verbs.app import app
from weft.spec.presets import PRESETS, presets_table
from weft.spec.settings import Settings
from weft.spec.strategy import Prefetch, Strategy
from weft.transport.wire.frames import ErrorCode

ROOT = Path(__file__).parents[1]
PAGES = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), ROOT / "benchmarks" / "README.md"]
EACH_PAGE = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


def text(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def blocks(markdown: str) -> str:
    """The fenced blocks, without their comments."""
    fenced = "\n".join(re.findall(r"```[a-z]*\n(.*?)```", markdown, flags=re.DOTALL))
    return re.sub(r"\s#.*", "", fenced)


def table(page: str, heading: str) -> dict[str, list[str]]:
    """The rows below a heading's line, by the name in backquotes in their first cell."""
    rows = {}
    for line in text(page).partition(heading)[2].partition("\n\n")[0].splitlines():
        first, *others = (cell.strip() for cell in line.strip("| ").split("|"))
        if first.startswith("`"):
            rows[first.strip("`")] = others
    return rows


@EACH_PAGE
def test_every_verb_of_weft_in_a_page_is_one_of_the_command(page: Path) -> None:
    verbs = {command.name or command.callback.__name__ for command in app.registered_commands if command.callback}
    named = re.findall(r"^(?:\$ )?weft ([a-z]+)", blocks(page.read_text(encoding="utf-8")), flags=re.MULTILINE)
    assert set(named) <= verbs


@EACH_PAGE
def test_every_make_target_in_a_page_is_in_the_makefile(page: Path) -> None:
    targets = set(re.findall(r"^([a-z-]+):", text("Makefile"), flags=re.MULTILINE))
    markdown = page.read_text(encoding="utf-8")
    named = re.findall(r"^(?:\$ )?make ([a-z-]+)", blocks(markdown), flags=re.MULTILINE)
    named += re.findall(r"`make ([a-z-]+)", markdown)
    assert set(named) <= targets


@EACH_PAGE
def test_every_link_in_a_page_leads_somewhere(page: Path) -> None:
    links = re.findall(r"\]\(([^)#]+)\)", page.read_text(encoding="utf-8"))
    missing = [link for link in links if "://" not in link and not (page.parent / link).exists()]
    assert missing == []


@EACH_PAGE
def test_every_file_that_a_page_names_is_there(page: Path) -> None:
    folders = "weft|tests|docs|systemd|examples|observability"
    named = re.findall(rf"`((?:{folders})/[\w./@-]*)`", page.read_text(encoding="utf-8"))
    assert [path for path in named if not (ROOT / path).exists()] == []


def test_the_architecture_names_files_and_the_names_in_them() -> None:
    page = text("docs/architecture.md")
    assert len(re.findall(r"`weft/[\w/]+\.py`", page)) > 20
    source = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "weft").rglob("*.py"))
    for owner, name in re.findall(
        r"\b(Core|Driver|Link|LaneLoop|HostLane|StreamLane|Board|Attempt|Service|_Worker)\.(_?[a-z_]+)", page
    ):
        assert f"class {owner}" in source
        assert f"def {name}(" in source


@pytest.mark.parametrize("script", ["generate.py", "timelines.py", "roles.py"])
def test_what_is_made_from_the_code_is_current(script: str) -> None:
    command = [sys.executable, str(ROOT / "docs" / script), "--check"]
    checked = subprocess.run(command, capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stderr


def test_the_protocol_page_has_every_verb_of_the_service() -> None:
    served = re.findall(r'^ {12}"([a-z]+)": self\._\1,', text("weft/scheduler/daemon/service.py"), flags=re.MULTILINE)
    assert list(table("docs/protocol.md", "| verb |")) == served


def test_the_protocol_page_has_every_error_code_with_its_exit_code() -> None:
    rows = {code: int(cells[-1]) for code, cells in table("docs/protocol.md", "| code |").items()}
    assert rows == {str(code): of_refusal(code) for code in ErrorCode}


def test_the_operations_page_has_every_setting_with_its_variable() -> None:
    rows = {name: cells[0].strip("`") for name, cells in table("docs/operations.md", "| `[daemon]`").items()}
    assert rows == {name: f"WEFT_{name.upper()}" for name in Settings.model_fields}


def test_the_strategies_page_has_the_current_table_of_presets() -> None:
    _, _, behind = text("docs/strategies.md").partition("<!-- presets: python -m weft.spec.presets -->\n")
    assert behind.partition("<!-- end of presets -->")[0] == presets_table()


def test_the_strategies_page_has_every_axis_with_its_default() -> None:
    def written(default: object) -> str:
        match default:
            case None:
                return "unset"
            case bool():
                return str(default).lower()
            case Prefetch():
                return f"load {written(default.load)}, transfer {default.transfer}"
            case _:
                return str(default)

    rows = {axis: cells[1].strip("`") for axis, cells in table("docs/strategies.md", "| axis |").items()}
    assert rows == {axis: written(field.default) for axis, field in Strategy.model_fields.items()}


def test_the_strategies_page_explains_every_preset_and_shows_every_timeline() -> None:
    page = text("docs/strategies.md")
    headings = " ".join(re.findall(r"^##+ (.*)", page, flags=re.MULTILINE)).split()
    assert set(PRESETS) <= set(headings)
    shown = re.findall(r"!\[[^\]]+\]\(timelines/([\w-]+\.svg)\)", page)
    assert sorted(shown) == sorted(path.name for path in (ROOT / "docs" / "timelines").glob("*.svg"))
