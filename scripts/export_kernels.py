"""Write the operators as a package for Hugging Face's kernels hub: ``python
scripts/export_kernels.py FOLDER``.

The layout is that of a package without compiled code: ``build.toml`` and
``torch-ext/tilefold_kernels``. All imports of the package are relative, and it needs only torch,
and Triton on a GPU. Its torch operators have a namespace of their own, so that it can be loaded
together with an installed tilefold. kernel-builder makes ``metadata.json`` from this folder.
"""

from __future__ import annotations

import hashlib
import re
import shutil
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src" / "tilefold"
NAME = "tilefold_kernels"
BESIDE = (
    "_internal/csr.py",
    "_internal/lazy.py",
    "distributed/process_group.py",
    "_internal/public.py",
    "_version.py",
)  # what operators use above them
BUILD = """[general]
name = "tilefold-kernels"
version = 1
backends = ["cuda"]

[torch-noarch]
"""
FRONT = '''"""Fused operators for neural retrieval: SPLADE heads, MaxSim, entmax, token scatter."""

from ._internal.public import PACKAGE_OF as _PACKAGE_OF
from ._version import __version__ as __version__
from .ops import *

__all__ = list(_PACKAGE_OF)
'''


def relative(text: str, depth: int, namespace: str) -> str:
    """A module `depth` folders below the package, with relative imports and the namespace of the
    exported operators.
    """
    dots = "." * (depth + 1)
    text = re.sub(
        r"^(\s*)from tilefold\.([\w.]+) import",
        rf"\1from {dots}\2 import",
        text,
        flags=re.MULTILINE,
    )
    text = re.sub(r"^(\s*)from tilefold import", rf"\1from {dots} import", text, flags=re.MULTILINE)
    text = re.sub(r'"tilefold(\.ops\.[\w.]+)"', r'__name__.partition(".ops.")[0] + "\1"', text)
    return text.replace("tilefold::", f"{namespace}::").replace(
        "torch.ops.tilefold",
        f"torch.ops.{namespace}",
    )


def main(target: Path) -> str:
    """Fill a folder anew; return the namespace of its operators, which depends on their sources."""
    files = sorted([*(SOURCE / "ops").rglob("*.py"), *(SOURCE / name for name in BESIDE)])
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()[:8]
    namespace, package = f"{NAME}_{digest}", target / "torch-ext" / NAME
    shutil.rmtree(target, ignore_errors=True)
    for path in files:
        place = package / path.relative_to(SOURCE)
        place.parent.mkdir(parents=True, exist_ok=True)
        depth = len(path.relative_to(SOURCE).parts) - 1
        place.write_text(
            relative(path.read_text(encoding="utf-8"), depth, namespace),
            encoding="utf-8",
        )
    (package / "__init__.py").write_text(FRONT, encoding="utf-8")
    (target / "build.toml").write_text(BUILD, encoding="utf-8")
    shutil.copy(ROOT / "LICENSE", target)
    return namespace


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    print(main(Path(sys.argv[1])))
