"""Pages of the reference of commands, generated from the commands of the program."""

from __future__ import annotations

import inspect
import re
from typing import Any

FOLDER = "reference/commands"
OPTION = re.compile(r"(?<![\w`-])--[a-z][\w-]*")
# The text of an option ends with its default, its range, and whether it is required.
REMARKS = re.compile(r"  \[(?P<remarks>[^\]]*)\]$")
# Characters that Markdown would interpret in the texts of the program.
MARKUP = re.compile(r"([\\*_{}\[\]<>`])")


def command_pages(group: Any) -> dict[str, str]:
    """Return the pages of the reference of commands.

    Args:
        group: the command group of the program, as ``typer.main.get_command`` returns it.

    Returns:
        path of each page -> its Markdown: an overview, and a page for each command.
    """
    pages = {f"{FOLDER}/index.md": _overview(group)}
    for name, command in group.commands.items():
        pages[f"{FOLDER}/tilefold-{name}.md"] = _command_page(name, command)
    return pages


def _overview(group: Any) -> str:
    """Return the page that lists the commands, each with the first sentence of its help."""
    lines = [
        "# Commands",
        "",
        "These pages are generated from the program.",
        "`tilefold COMMAND --help` prints the same texts.",
        "The [guides](../../docs/cli.md) show the commands at work.",
        "",
        "| command | purpose |",
        "|---|---|",
    ]
    for name, command in group.commands.items():
        summary = " ".join(_paragraphs(command)[0].split())
        lines.append(f"| [`tilefold {name}`](tilefold-{name}.md) | {_marked_up(summary)} |")
    return "\n".join(lines) + "\n"


def _command_page(name: str, command: Any) -> str:
    """Return the page of a command: usage, description, example, and its options in groups."""
    import typer

    context = typer.Context(command, info_name=name)
    usage = " ".join(["tilefold", name, *command.collect_usage_pieces(context)])
    lines = [f"# tilefold {name}", ""]
    for paragraph in _paragraphs(command):
        if not paragraph.startswith("Example:"):
            lines += [_marked_up(" ".join(paragraph.split())), ""]
    lines += ["## Usage", "", "```text", usage, "```", ""]
    for paragraph in _paragraphs(command):
        if paragraph.startswith("Example:"):
            commands = [line.strip() for line in paragraph.splitlines()[1:]]
            lines += ["Example:", "", "```sh", *commands, "```", ""]
    for title, records in command.option_groups(context).items():
        lines += [f"## {title}", ""]
        for declaration, text in records:
            lines += _definition(declaration, text)
    return "\n".join(lines)


def _paragraphs(command: Any) -> list[str]:
    """Return the paragraphs of the help of a command."""
    return inspect.cleandoc(command.help).split("\n\n")


def _definition(declaration: str, text: str) -> list[str]:
    """Return the lines of an entry of a definition list.

    Args:
        declaration: the spelling of an option with the type of its value.
        text: its help text, with remarks in brackets at the end.
    """
    remarks = REMARKS.search(text)
    description = _marked_up(REMARKS.sub("", text))
    if remarks is not None:
        for remark in remarks["remarks"].split("; "):
            description += f" {_remark(remark)}"
    # The anchor is the first name of a declaration such as `--resume / --fresh`.
    anchor = declaration.split(maxsplit=1)[0].rstrip(".,")
    return [f"`{declaration}`{{ #{anchor} }}", f":   {description}", ""]


def _remark(remark: str) -> str:
    """Return the sentence of a remark, such as ``default: 0``, ``required`` or ``x>=0``."""
    name, _, value = remark.partition(": ")
    if name == "default":
        return f"Default: `{value}`."
    if remark == "required":
        return "**Required.**"
    return f"Range: `{remark}`."


def _marked_up(text: str) -> str:
    """Return a text of the program as Markdown, with its options as code."""
    escaped = MARKUP.sub(lambda match: _escape(match[1]), text)
    return OPTION.sub(lambda match: f"`{match[0]}`", escaped)


def _escape(character: str) -> str:
    """Return a character that Markdown shows unchanged."""
    entities = {"<": "&lt;", ">": "&gt;"}
    return entities.get(character, f"\\{character}")
