"""The reference of commands on the site is generated from the program, complete and in groups."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import typer.main

from tests.scripts import load_script
from tilefold import cli

ROOT = Path(__file__).resolve().parents[2]
generator = load_script(ROOT / "docs" / "site" / "command_reference.py")
ENTRY = re.compile(r"^`(?P<declaration>[^`]+)`\{ #(?P<anchor>\S+) \}$", re.MULTILINE)


@pytest.fixture(scope="module")
def group() -> Any:
    return typer.main.get_command(cli.app)


@pytest.fixture(scope="module")
def pages(group: Any) -> dict[str, str]:
    return generator.command_pages(group)  # type: ignore[no-any-return]


def page_of(command: str) -> str:
    return f"reference/commands/tilefold-{command}.md"


@pytest.mark.parametrize("command", cli.COMMANDS)
def test_the_page_of_a_command_has_each_of_its_options_once(
    command: str,
    group: Any,
    pages: dict[str, str],
) -> None:
    page = pages[page_of(command)]
    entries = [entry["declaration"] for entry in ENTRY.finditer(page)]
    spellings = {
        spelling
        for entry in entries
        for spelling in re.findall(r"(?:^|[/,] )(--[\w-]+|\w+)", entry)
    }
    expected = {"--help"}
    parameters = [
        parameter
        for parameter in group.commands[command].params
        if not getattr(parameter, "hidden", False)
    ]
    for parameter in parameters:
        is_option = parameter.opts[0].startswith("-")
        names = (*parameter.opts, *parameter.secondary_opts) if is_option else (parameter.name,)
        expected.update(names)
    assert spellings == expected
    assert len(entries) == len(parameters) + 1, "those of the command and --help"
    anchors = [entry["anchor"] for entry in ENTRY.finditer(page)]
    assert len(set(anchors)) == len(anchors)
    assert all(re.fullmatch(r"[\w-]+", anchor) for anchor in anchors)


@pytest.mark.parametrize("command", cli.COMMANDS)
def test_the_page_of_a_command_has_usage_an_example_and_groups(
    command: str,
    group: Any,
    pages: dict[str, str],
) -> None:
    page = pages[page_of(command)]
    assert page.startswith(f"# tilefold {command}\n\n")
    assert f"```text\ntilefold {command} [OPTIONS]" in page
    assert f"```sh\ntilefold {command}" in page
    headings = re.findall(r"^## (.+)$", page, re.MULTILINE)
    panels = {
        parameter.rich_help_panel
        for parameter in group.commands[command].params
        if parameter.rich_help_panel
    }
    assert panels | {"Usage", "Options"} <= set(headings)
    assert len(set(headings)) == len(headings)


def test_the_overview_links_to_the_page_of_each_command(pages: dict[str, str]) -> None:
    overview = pages["reference/commands/index.md"]
    assert re.findall(r"\(tilefold-(\w+)\.md\)", overview) == list(cli.COMMANDS)
    assert set(pages) == {"reference/commands/index.md", *map(page_of, cli.COMMANDS)}


def test_an_entry_shows_the_type_the_default_and_whether_an_option_is_required(
    pages: dict[str, str],
) -> None:
    train = pages[page_of("train")]
    assert (
        "`--output <path>`{ #--output }\n:   Folder for the trained model. **Required.**" in train
    )
    assert re.search(r"^`--seed <int>`\{ #--seed \}\n:   .* Default: `0`\.$", train, re.MULTILINE)
    assert "`--attention softmax|entmax`{ #--attention }" in train


def test_texts_of_the_program_are_no_markup() -> None:
    marked_up = generator._marked_up("set a_b*c <d> [e] with --top-k")
    assert marked_up == r"set a\_b\*c &lt;d&gt; \[e\] with `--top-k`"
