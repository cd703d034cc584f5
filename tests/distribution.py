"""Check what a wheel and an sdist hold: ``python tests/distribution.py dist``."""

from __future__ import annotations

import subprocess
import sys
import tarfile
import zipfile
from email.parser import Parser
from pathlib import Path

from packaging.metadata import Metadata

ROOT = Path(__file__).parents[1]
NEEDED = ("LICENSE", "README.md", "CHANGELOG.md", "pyproject.toml")


def check_wheel(path: Path, sources: set[str]) -> None:
    """Every source of the package, its license and its command, and nothing else but metadata."""
    with zipfile.ZipFile(path) as wheel:
        names = {name for name in wheel.namelist() if ".dist-info/" not in name}
        others = set(wheel.namelist()) - names
        info = {name.partition(".dist-info/")[2]: wheel.read(name).decode() for name in others}
    _same(path.name, names, {source.removeprefix("src/") for source in sources})
    Metadata.from_email(
        info["METADATA"],
        validate=True,
    )  # as PyPI reads it; raises for a field that PyPI refuses
    metadata = Parser().parsestr(info["METADATA"])
    required = [each for each in metadata.get_all("Requires-Dist", []) if "extra ==" not in each]
    _same(f"{path.name}: requirements without an extra", set(required), {"torch>=2.8"})
    _same(f"{path.name}: license", {"licenses/LICENSE"} & info.keys(), {"licenses/LICENSE"})
    if metadata["Description-Content-Type"] != "text/markdown" or "# tilefold" not in str(
        metadata.get_payload(),
    ):
        sys.exit(f"{path.name} shows no README on PyPI")
    if "tilefold = tilefold.cli:main" not in info["entry_points.txt"]:
        sys.exit(f"{path.name} has no command `tilefold`")


def check_sdist(path: Path, sources: set[str]) -> None:
    """The sources, the tests and what the build needs; no results of builds and no caches."""
    with tarfile.open(path) as sdist:
        names = {name.partition("/")[2] for name in sdist.getnames()}
    missing = (sources | set(NEEDED)) - names
    unwanted = {
        name
        for name in names
        if name.startswith(("dist/", ".venv", "build/")) or "__pycache__" in name
    }
    _same(f"{path.name}: missing", missing, set())
    _same(f"{path.name}: unwanted", unwanted, set())


def _same(what: str, got: set[str], expected: set[str]) -> None:
    if got != expected:
        sys.exit(
            f"{what}: too much {sorted(got - expected)[:10]}, missing "
            f"{sorted(expected - got)[:10]}",
        )


def main(folder: Path) -> None:
    """Check the only wheel and the only sdist of a folder."""
    tracked = subprocess.run(
        ["git", "ls-files", "src"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    (wheel,), (sdist,) = folder.glob("*.whl"), folder.glob("*.tar.gz")
    check_wheel(wheel, set(tracked.split()))
    check_sdist(sdist, set(tracked.split()))
    sys.stdout.write(
        f"{wheel.name} ({wheel.stat().st_size / 1e6:.1f} MB) and {sdist.name} hold what they "
        "should\n",
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
