"""Write the pages of the site to a folder for mkdocs; `make docs` calls this script.

Pages keep their paths in the repository, so that relative links hold. Files that they link to are
copied, and a folder that they link to gets a page that lists it. Pages of the API name the public
names of the package, and pages of the commands are generated from the program. ``llms.txt`` has the
titles and first sentences of the pages.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
LINK = re.compile(r"(!?\[[^\]]*\]\()([^)\s#]+)((?:#[^)\s]*)?(?:\s+\"[^\"]*\")?\))")
FENCED = re.compile(r"(^```.*?^```)", re.MULTILINE | re.DOTALL)
# Words of a page that become links to generated pages, which the repository does not have.
GENERATED_LINKS = {
    "docs/cli.md": (
        "The reference on the documentation site",
        "../reference/commands/index.md",
    ),
    "docs/python.md": (
        "the reference of all classes and functions",
        "../reference/python/retrieval.md",
    ),
}
LIST = re.compile(r"^(?![-*|#> ]|\d+\. )(\S.*:)\n(?=(?:- |\d+\. ))", re.MULTILINE)


def main(target: Path) -> None:
    """Write the pages of the site, and the sources for the API, to an empty folder."""
    # This folder is on the path when this file runs as a script, but not when tests import it.
    from api_reference import api_pages, write_sources
    from command_reference import command_pages

    shutil.rmtree(target, ignore_errors=True)
    site = Site(_repository_files())
    for name in site.pages:
        site.add_page(name)
    generated = api_pages() | command_pages(command_group())
    site.texts.update(generated)
    site.texts["llms.txt"] = llms_text(
        {name: site.texts[name] for name in (*site.pages, *generated)},
        os.environ.get("SITE_URL", ""),
    )
    site.write(target)
    write_sources(target.parent / "api")


def command_group() -> Any:
    """Return the command group of the program, as ``tilefold --help`` shows it."""
    import typer.main

    from tilefold import cli

    return typer.main.get_command(cli.app)


def _repository_files() -> list[str]:
    """Return the files of the repository that git tracks or does not ignore."""
    names: list[str] = []
    for options in ([], ["--others", "--exclude-standard"]):
        command = ["git", "ls-files", *options]
        names += subprocess.check_output(command, cwd=ROOT, text=True).splitlines()
    return names


class Site:
    """The files of the site, collected before they are written.

    Attributes:
        pages: Markdown files of the repository that become pages.
        texts: path of each file with a new text -> the text.
        copies: paths of the files that are copied unchanged.
    """

    def __init__(self, names: list[str]) -> None:
        """Collect the pages among the files of the repository."""
        self.pages = [
            name
            for name in names
            if name.endswith(".md") and not name.startswith((".github", "tests"))
        ]
        self.texts: dict[str, str] = {}
        self.copies: set[str] = set()
        self._folders = {str(parent) for name in names for parent in Path(name).parents}

    def add_page(self, name: str) -> None:
        """Add a page whose links lead to files of the site."""
        # The odd parts are code blocks, which are not changed.
        parts = FENCED.split((ROOT / name).read_text(encoding="utf-8"))
        for position in range(0, len(parts), 2):
            linked = LINK.sub(partial(self._redirect, name), parts[position])
            parts[position] = LIST.sub(r"\1\n\n", linked)
        text = "".join(parts)
        if name in GENERATED_LINKS:
            words, address = GENERATED_LINKS[name]
            text = text.replace(words, f"[{words}]({address})", 1)
        self.texts[name] = text

    def write(self, target: Path) -> None:
        """Write all files below a folder."""
        for name in (*self.texts, *self.copies):
            (target / name).parent.mkdir(parents=True, exist_ok=True)
        for name, text in self.texts.items():
            (target / name).write_text(text, encoding="utf-8")
        for name in self.copies - self.texts.keys():
            (target / name).write_bytes((ROOT / name).read_bytes())

    def _redirect(self, page: str, link: re.Match[str]) -> str:
        """Return a link of a page to a file of the site, and add that file to the site.

        A link to a folder leads to its README, or to a page that lists what it holds.
        """
        before, address, after = link.groups()
        if re.match(r"[a-z]+:", address):
            return link[0]
        name = str((ROOT / page).parent.joinpath(address).resolve().relative_to(ROOT))
        if name in self._folders:
            if (ROOT / name / "README.md").exists():
                return f"{before}{address.rstrip('/')}/README.md{after}"
            self._add_listing(name)
            return f"{before}{address.rstrip('/')}/listing.md{after}"
        if not name.endswith(".md"):
            self.copies.add(name)
        return link[0]

    def _add_listing(self, folder: str) -> None:
        """Add a page that lists the files of results, the pages and the folders of a folder."""
        files = sorted(path.name for path in (ROOT / folder).glob("*.csv"))
        pages = sorted(path.name for path in (ROOT / folder).glob("*.md"))
        folders = sorted(
            Path(name).name for name in self._folders if str(Path(name).parent) == folder
        )
        lines = [f"# {folder}", ""]
        lines += [f"- [{file}]({file})" for file in (*pages, *files)]
        lines += [f"- {name}" for name in folders]
        self.texts[f"{folder}/listing.md"] = "\n".join(lines) + "\n"
        self.copies.update(f"{folder}/{file}" for file in files)


# Sections of llms.txt, and the beginnings of the paths of their pages.
LLMS_SECTIONS = {
    "Documentation": ("README.md", "docs/"),
    "Commands": ("reference/commands/",),
    "Python": ("reference/python/",),
    "Packages and operators": ("src/",),
    "Optional": ("",),
}


def llms_text(pages: Mapping[str, str], site_url: str) -> str:
    """Return the text of ``llms.txt``, the list of pages that llmstxt.org describes.

    Args:
        pages: path of each page in the repository -> its Markdown.
        site_url: address of the site with a slash at its end; links are relative if it is empty.
    """
    lines = [
        "# tilefold",
        "",
        "> Training, encoding, indexing, search and serving of neural retrievers, with fused",
        "> operators for SPLADE heads, ColBERT MaxSim and entmax attention.",
    ]
    remaining = sorted(pages)
    for section, beginnings in LLMS_SECTIONS.items():
        names = [name for name in remaining if name.startswith(beginnings)]
        remaining = [name for name in remaining if name not in names]
        lines += ["", f"## {section}", ""]
        lines += [_llms_line(name, pages[name], site_url) for name in names]
    return "\n".join(lines) + "\n"


def _llms_line(name: str, text: str, site_url: str) -> str:
    """Return the line of a page in ``llms.txt``: its title, address and first sentence."""
    title, _, body = text.partition("\n")
    folder = re.sub(r"(README|index)?\.md$", "", name).rstrip("/")
    address = site_url + (f"{folder}/" if folder else "")
    return f"- [{title.lstrip('# ')}]({address or './'}): {first_sentence(body)}"


def first_sentence(markdown: str) -> str:
    """Return the first sentence of prose of a page as plain text, or an empty text."""
    for paragraph in FENCED.sub("", markdown).split("\n\n"):
        if re.match(r"\s*[A-Z`]", paragraph):
            plain = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", " ".join(paragraph.split()))
            return re.split(r"(?<=[a-z)`\]\d]\.) ", plain, maxsplit=1)[0]
    return ""


if __name__ == "__main__":
    main(Path(sys.argv[1]))
