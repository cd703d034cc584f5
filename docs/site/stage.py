"""Copy what the site shows to a folder for mkdocs: ``python docs/site/stage.py build/pages``.

Documents keep their paths, so that their relative links hold; files that they link to are copied
too, and a folder that they link to gets a page that lists it. Pages of the API are made from the
public names of the package, and `llms.txt` from the titles and first sentences of the pages.
"""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
LINK = re.compile(r"(!?\[[^\]]*\]\()([^)\s#]+)((?:#[^)\s]*)?(?:\s+\"[^\"]*\")?\))")
FENCED = re.compile(r"(^```.*?^```)", re.MULTILINE | re.DOTALL)
LIST = re.compile(r"^(?![-*|#> ]|\d+\. )(\S.*:)\n(?=(?:- |\d+\. ))", re.MULTILINE)
API = {  # page -> its title and modules, whose `__all__` says what is public
    "operators": ("Operators", ["tilefold.ops", "tilefold.ops.sparse_search"]),
    "modules": ("Modules and losses", ["tilefold.nn", "tilefold.modules", "tilefold.losses"]),
    "integrations": (
        "Integrations",
        [
            f"tilefold.integrations.{name}"
            for name in ("sentence_transformers", "transformers", "pylate", "colpali")
        ],
    ),
    "retrieval": ("Retrieval", ["tilefold.retrieval"]),
    "recipes": ("Recipes", ["tilefold.recipes"]),
    "testing": ("Testing", ["tilefold.testing"]),
}


def public(module: str) -> list[str]:
    """Paths of the public names of a module, read and not imported, by its table of homes,
    `__all__` or imports.
    """
    path = ROOT / "src" / Path(*module.split("."))
    path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    if module == "tilefold.ops":
        return [
            f"{module}.{room}.{name}"
            for name, room in sorted(
                _tables(path.parents[1] / "_internal" / "public.py")["PACKAGE_OF"].items()
            )
        ]
    tables = _tables(path)
    if "_NAMES" in tables:
        return [
            f"{module}.{home}.{name}"
            for home, names in tables["_NAMES"].items()
            for name in names.split()
        ]
    if "__all__" in tables:
        text = path.read_text(
            encoding="utf-8",
        )  # handles that modules share are described where they are defined
        return [
            f"{module}.{name}"
            for name in tables["__all__"]
            if re.search(rf"(^(def|class) |import .*|^    ){name}\b", text, re.M)
        ]
    nodes = ast.parse(path.read_text(encoding="utf-8")).body
    imported = [
        each.name
        for node in nodes
        if isinstance(node, ast.ImportFrom)
        for each in node.names
        if each.asname
    ]
    made = [
        node.name
        for node in nodes
        if isinstance(node, ast.FunctionDef) and not node.name.startswith("_")
    ]
    return [f"{module}.{name}" for name in imported + made]


def _tables(path: Path) -> dict[str, Any]:
    """The names at the top of a module that stand for lists or dictionaries of texts."""
    found: dict[str, Any] = {}
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            with suppress(ValueError):
                found[node.targets[0].id] = ast.literal_eval(node.value)
    return found


def main(target: Path) -> None:
    """Fill the folder anew."""
    shutil.rmtree(target, ignore_errors=True)
    tracked = subprocess.check_output(["git", "ls-files"], cwd=ROOT, text=True).split("\n")
    tracked += subprocess.check_output(
        ["git", "ls-files", "-o", "--exclude-standard"],
        cwd=ROOT,
        text=True,
    ).split("\n")
    folders = {str(parent) for name in tracked for parent in Path(name).parents}
    pages = [
        name
        for name in tracked
        if name.endswith(".md") and not name.startswith((".github", "tests"))
    ]
    made: dict[str, str] = {}
    for name in pages:
        parts = FENCED.split((ROOT / name).read_text(encoding="utf-8"))
        for at in range(0, len(parts), 2):
            parts[at] = LIST.sub(r"\1\n\n", LINK.sub(partial(_led, name, folders, made), parts[at]))
        made[name] = "".join(parts)
    for page, (title, modules) in API.items():
        made[f"api/{page}.md"] = f"# {title}\n" + "".join(
            f"\n::: {path}\n" for m in modules for path in public(m)
        )
    shutil.rmtree(target.parent / "api", ignore_errors=True)
    for path in sorted(
        (ROOT / "src").rglob("*.py"),
    ):  # docstrings without Sphinx's roles, which mkdocs does not know
        copy = target.parent / "api" / path.relative_to(ROOT / "src")
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_text(
            re.sub(r":(func|class|meth|mod|attr|data):`~?", "`", path.read_text(encoding="utf-8")),
        )
    made["llms.txt"] = llms_text(
        {name: made[name] for name in pages},
        os.environ.get("SITE_URL", ""),
    )
    for name, text in made.items():
        place = target / name
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes((ROOT / name).read_bytes()) if text == COPIED else place.write_text(
            text,
            encoding="utf-8",
        )


COPIED = "\0"


def _led(page: str, folders: set[str], made: dict[str, str], link: re.Match[str]) -> str:
    """A link of a page, led to what the site has; what it leads to is added to what is made."""
    before, to, after = link.groups()
    if re.match(r"[a-z]+:", to):
        return link[0]
    name = str((ROOT / page).parent.joinpath(to).resolve().relative_to(ROOT))
    if name in folders:
        inside = sorted(
            path.name
            for path in (ROOT / name).iterdir()
            if path.is_file() and path.suffix == ".csv"
        )
        listed = f"{name}/listing.md"
        if (ROOT / name / "README.md").exists():
            return f"{before}{to.rstrip('/')}/README.md{after}"
        made.setdefault(
            listed,
            f"# {name}\n\n" + "".join(f"- [{file}]({file})\n" for file in inside) + "\n",
        )
        made.update({f"{name}/{file}": COPIED for file in inside})
        for folder in sorted(each for each in folders if str(Path(each).parent) == name):
            short = Path(folder).name
            made[listed] += f"- {short}\n"
        return f"{before}{to.rstrip('/')}/listing.md{after}"
    if not name.endswith(".md"):
        made.setdefault(name, COPIED)
    return link[0]


# Sections of llms.txt, and the beginnings of the paths of their pages.
LLMS_SECTIONS = {
    "Documentation": ("README.md", "docs/"),
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
