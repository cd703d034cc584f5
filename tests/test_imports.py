"""What importing the package costs and needs, each in a fresh interpreter; which module may import
which.
"""

from __future__ import annotations

import ast
import functools
import graphlib
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from tests import programs
from tests.processes import environment

HEAVY = (
    *(
        "triton",
        "transformers",
        "sentence_transformers",
        "datasets",
        "pyarrow",
        "matplotlib",
        "seismic",
        "bm25s",
    ),
    *("qdrant_edge", "qdrant_client", "ray"),
)

# Hides distributions as if they had never been installed: find_spec answers None, import raises.
HIDE = """
import importlib.machinery, sys
class Hide:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name.partition(".")[0] in {hidden!r}:
            return None
        return importlib.machinery.PathFinder.find_spec(name, path, target)
sys.meta_path = [Hide if f is importlib.machinery.PathFinder else f for f in sys.meta_path]
"""

USE = """
import torch, tilefold
hidden = torch.randn(2, 5, 8, requires_grad=True)
weight = torch.randn(11, 8, requires_grad=True)
tilefold.lsr_head(hidden, weight, attention_mask=torch.ones(2, 5)).sum().backward()
assert hidden.grad is not None and weight.grad is not None
assert tilefold.lsr_head_sparse(hidden.detach(), weight.detach(), top_k=3).layout == torch.sparse_csr
tilefold.nn.LSRHead
ids = torch.arange(10).view(2, 5)
tilefold.token_scatter(hidden[..., 0], ids, 11).sum().backward()
assert tilefold.token_scatter_sparse(hidden[..., 0], ids, 11, top_k=3).layout == torch.sparse_csr
"""


def run_python(code: str) -> str:
    """Standard output of ``code`` in a fresh interpreter; fails the test with its error if it
    fails.
    """
    command, variables = [sys.executable, "-c", code], environment(OMP_NUM_THREADS="1")
    done = subprocess.run(command, env=variables, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        pytest.fail(f"the fresh interpreter failed:\n{done.stderr}")
    return done.stdout


def loaded_after(code: str, names: tuple[str, ...]) -> set[str]:
    """Which of ``names`` are in ``sys.modules`` after ``code``."""
    return set(
        run_python(
            f"{code}\nimport sys\nprint(*[n for n in {names!r} if n in sys.modules])",
        ).split(),
    )


def test_importing_the_package_and_using_the_operators_on_the_cpu_load_torch_only() -> None:
    assert loaded_after("import tilefold", (*HEAVY, "torch")) <= {"torch"}
    # torch imports triton itself for some of its own features: what counts is what it does not
    # bring along
    brought_by_torch = loaded_after("import torch, torch.library, torch.utils.checkpoint", HEAVY)
    assert loaded_after(USE, HEAVY) <= brought_by_torch


def test_the_operators_work_without_triton_and_every_optional_package() -> None:
    run_python(HIDE.format(hidden=set(HEAVY) | {"typer", "rich", "numpy"}) + USE)


def test_asking_for_triton_where_it_is_not_installed_says_so() -> None:
    code = """
import os
os.environ["TRITON_INTERPRET"] = "1"
import torch, tilefold
try:
    tilefold.lsr_head(torch.randn(1, 2, 4), torch.randn(3, 4), impl="triton")
except RuntimeError as error:
    print(error)
"""
    printed = run_python(HIDE.format(hidden={"triton"}) + code)
    assert "triton is not installed" in printed
    assert "impl='auto'" in printed


def test_a_command_imports_no_other_command() -> None:
    code = """
import sys
from tilefold import cli
try:
    cli.main(["search", "a query", "--k", "0"])
except SystemExit as leave:
    assert leave.code == 2
"""
    others = ("tilefold.cli.demo", "tilefold.cli.serve", "tilefold.cli.train", "torch")
    assert loaded_after(code, ("tilefold.cli.search", *others)) == {"tilefold.cli.search"}


def test_help_does_not_load_torch() -> None:
    code = """
import sys
from typer.testing import CliRunner
import typer.main
from tilefold import cli
result = CliRunner().invoke(cli.app, ["--help"])
assert result.exit_code == 0, result.output
"""
    assert loaded_after(code, (*HEAVY, "torch")) == set()


RECORD_GPU_QUERIES = """
import torch

queries = []

def recorded(name, answer):
    def query(*args, **kwargs):
        queries.append(name)
        return answer
    return query

torch.cuda.is_available = recorded("is_available", False)
torch.cuda.device_count = recorded("device_count", 0)
torch.cuda._lazy_init = recorded("_lazy_init", None)
torch.compile = recorded("torch.compile", None)  # it asks, from some releases of torch
try:
    from triton.backends.nvidia.driver import CudaDriver
except ImportError:
    pass
else:
    CudaDriver.is_active = staticmethod(recorded("CudaDriver.is_active", False))
"""
IMPORT_EVERYTHING = """
import importlib, pkgutil
import tilefold

for module in pkgutil.walk_packages(tilefold.__path__, "tilefold."):
    if not module.name.endswith("__main__"):
        try:
            importlib.import_module(module.name)
        except ImportError:  # of an optional package
            pass
"""
ENCODE = """
import torch, tilefold

hidden, weight = torch.randn(2, 5, 8), torch.randn(11, 8)
tilefold.lsr_head(hidden, weight, attention_mask=torch.ones(2, 5))
tilefold.maxsim(hidden, hidden)
tilefold.entmax(hidden)
"""
USE_CUDA_IN_A_FORK = """
import os, sys, torch

child = os.fork()
if child == 0:
    torch.zeros(1, device="cuda")
    os._exit(0)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


RECORD_IMPORTS_OF_EVERYTHING = f"{RECORD_GPU_QUERIES}{IMPORT_EVERYTHING}print(queries)"


def test_no_import_asks_whether_there_is_a_gpu() -> None:
    # the question initialises CUDA, after which no forked process can use it
    process = programs.run("-c", RECORD_IMPORTS_OF_EVERYTHING, env=environment())
    assert process.returncode == 0, process.stderr
    assert process.stdout.splitlines()[-1] == "[]"


@pytest.mark.slow
def test_no_import_of_other_libraries_asks_whether_there_is_a_gpu() -> None:
    """The same in a fresh interpreter, which imports sentence-transformers too."""
    assert run_python(RECORD_IMPORTS_OF_EVERYTHING).splitlines()[-1] == "[]"


@pytest.mark.gpu
@pytest.mark.parametrize(
    "before",
    [
        pytest.param(IMPORT_EVERYTHING, id="every module"),
        pytest.param(ENCODE, id="operators on the CPU"),  # torch's own backward initialises CUDA
    ],
)
def test_a_forked_process_can_use_cuda_afterwards(before: str) -> None:
    run_python(before + USE_CUDA_IN_A_FORK)


PACKAGE = Path(__file__).resolve().parents[1] / "src" / "tilefold"

Graph = Mapping[str, frozenset[str]]


@functools.cache
def sources() -> dict[str, Path]:
    """Module name -> file; a package has the name of its folder."""
    results: dict[str, Path] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
        results[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return results


@functools.cache
def import_graph() -> Graph:
    """Module -> modules of the package that it imports. A package that is imported on the way to
    one is left out.
    """
    files = sources()
    return {module: frozenset(_imports(path, files)) - {module} for module, path in files.items()}


def _imports(path: Path, files: Mapping[str, Path]) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in files)
        elif isinstance(node, ast.ImportFrom) and node.module in files:
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                yield name if name in files else node.module


# Package -> packages that it may import besides itself. Every package may import `_internal` and
# `distributed`, which are below all others.
ARROWS = {
    "_internal": set(),
    "distributed": set(),
    "ops": set(),
    "pipeline": set(),
    "nn": {"ops"},
    "losses": {"ops"},
    "retrieval": {"ops", "pipeline"},
    "testing": {"ops"},
    "modules": {"nn", "ops"},
    "integrations": {"losses", "modules", "nn", "ops", "pipeline"},
    "recipes": {"integrations", "losses", "modules", "retrieval"},
    "bench": {"ops", "testing"},
    "serve": {"integrations", "ops", "retrieval"},
    "cli": {"bench", "integrations", "ops", "recipes", "retrieval", "serve"},
}
# An operator's files of one name, with whatever follows it, are one implementation.
IMPLEMENTATIONS = ("_reference", "_tiled", "_triton")
# What stands above them in a room.
DISPATCH = ("api",)
# Files that read sys.modules for another reason than to import what lies there.
LOOKS_AT_LOADED_MODULES = {
    "_internal/lean_imports.py": "takes deferred modules of other libraries out",
    "retrieval/index/bm25.py": "hides JAX from bm25s",
}
# The one operator that is specified by another: an entry that is no longer needed fails its test.
SPECIFIED_BY_ANOTHER = {("tilefold.ops.entmax_attention._reference", "tilefold.ops.entmax")}


def arrows() -> list[tuple[str, str]]:
    return [
        (module, target) for module, targets in import_graph().items() for target in sorted(targets)
    ]


BOTTOM = {"_internal", "distributed"}


def room(module: str) -> str:
    """``""`` for a module at the top of the package, which is no room."""
    name = module.partition(".")[2].partition(".")[0]
    return name if name in ARROWS else ""


def family(part: str, names: tuple[str, ...]) -> str | None:
    return next((name for name in names if part == name or part.startswith(f"{name}_")), None)


def is_backward_among_operators(module: str, target: str) -> bool:
    """``tilefold.ops.<operator>.<file>``: operators use ``_shared`` alone; implementations nothing
    above or beside.
    """
    here, there = module.split(".")[2:], target.split(".")[2:]
    if not here or here[0].partition("_")[0] in (
        "implementations",
        "checks",
    ):  # the doors to all operators
        return False
    if not there:
        return True
    if here[0] != there[0]:
        return there[0] != "_shared"
    mine, other = (family([*parts, ""][1], IMPLEMENTATIONS) for parts in (here, there))
    if mine is None:
        return False
    return len(there) == 1 or family(there[1], DISPATCH) is not None or other not in (None, mine)


def test_arrows_between_modules_and_rooms_point_one_way() -> None:
    graphlib.TopologicalSorter(import_graph()).prepare()  # CycleError names the modules of a circle
    assert set(ARROWS) == {
        path.name for path in PACKAGE.iterdir() if (path / "__init__.py").is_file()
    }
    backward = {
        (module, target)
        for module, target in arrows()
        if target == "tilefold"
        or (module != "tilefold" and not room(module) and room(target))
        or (
            room(module)
            and room(target)
            and room(target) not in {room(module), *BOTTOM, *ARROWS[room(module)]}
        )
        or (room(module) == room(target) == "ops" and is_backward_among_operators(module, target))
    }
    assert backward == SPECIFIED_BY_ANOTHER


# Folders of tilefold.retrieval, from bottom to top: each may import those before it.
RETRIEVAL_LAYERS = (
    "errors",
    "common",
    "data",
    "vectors",
    "index",
    "encoding",
    "search",
    "evaluation",
    "training_data",
)


def test_folders_of_retrieval_import_lower_ones_only() -> None:
    upward = []
    for module, target in arrows():
        if module.startswith("tilefold.retrieval.") and target.startswith("tilefold.retrieval"):
            importing = module.split(".")[2]
            imported = [*target.split("."), ""][2]
            layers = RETRIEVAL_LAYERS[: RETRIEVAL_LAYERS.index(importing) + 1]
            if imported not in layers:
                upward.append((module, target))
    assert upward == []


def test_modules_with_an_underscore_are_imported_by_their_own_package_only() -> None:
    crossing = set()
    for module, target in arrows():
        parts = target.split(".")
        private = next((place for place, part in enumerate(parts) if part.startswith("_")), None)
        if private is not None and parts[:private] != module.split(".")[:private]:
            crossing.add((module, target))
    assert crossing == set()


def test_no_arrow_is_hidden_in_loaded_modules_or_in_a_string() -> None:
    hidden = []
    for path in sources().values():
        name = str(path.relative_to(PACKAGE))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute) and ast.unparse(node) == "sys.modules":
                hidden += [f"{name}:{node.lineno}"] if name not in LOOKS_AT_LOADED_MODULES else []
            elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
                text = ast.unparse(node.args[0])
                hidden += [f"{name}:{node.lineno}"] if "tilefold" in text else []
    assert hidden == []
    for name in LOOKS_AT_LOADED_MODULES:
        assert "sys.modules" in (PACKAGE / name).read_text(encoding="utf-8"), (
            f"{name} does no longer: take it out"
        )
