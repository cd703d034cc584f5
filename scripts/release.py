"""Check a release's tag, and print its notes: ``python scripts/release.py check v0.1.0``, ``...
notes``.

The version stands in ``src/tilefold/_version.py`` alone. A tag is ``v`` and that version;
`CHANGELOG.md` must then have a section ``## [version] - date``, which is what `notes` prints.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def version() -> str:
    """The version that stands in the package."""
    (found,) = re.findall(
        r'^__version__ = "(.+)"$',
        (ROOT / "src/tilefold/_version.py").read_text(),
        re.MULTILINE,
    )
    return str(found)


def notes(changelog: str, release: str) -> str:
    """The section of a release in the text of a changelog; SystemExit if there is none, or it has
    no date or text.
    """
    sections = re.split(r"^## ", changelog, flags=re.MULTILINE)[1:]
    found = [section for section in sections if section.startswith(f"[{release}]")]
    head, _, body = found[0].partition("\n") if found else ("", "", "")
    if not re.fullmatch(rf"\[{re.escape(release)}\] - \d{{4}}-\d\d-\d\d", head) or not body.strip():
        got = f"{head!r}" if found else "no such section"
        sys.exit(
            f"CHANGELOG.md must have a section '## [{release}] - YYYY-MM-DD' with text, got {got}.",
        )
    return body.strip() + "\n"


def check(tag: str, release: str, changelog: str) -> None:
    """SystemExit unless a tag is that of the release, and the changelog has its section."""
    if tag != f"v{release}":
        sys.exit(
            f"the tag must be 'v{release}', the version in src/tilefold/_version.py, got {tag!r}.",
        )
    notes(changelog, release)


def main(arguments: list[str]) -> None:
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    if arguments[:1] == ["check"] and len(arguments) == 2:
        check(arguments[1], version(), changelog)
    elif arguments == ["notes"]:
        sys.stdout.write(notes(changelog, version()))
    else:
        sys.exit(__doc__)


if __name__ == "__main__":
    main(sys.argv[1:])
