"""The documents: their links lead somewhere, their commands exist, their tables name files, their
Python runs.
"""

from __future__ import annotations

import ast
import csv
import json
import re
from pathlib import Path
from typing import Any

import pytest
import typer.main

from benchmarks import claims_table
from tests.recipes.small import VOCABULARY, small_masked_lm
from tilefold import cli
from tilefold.bench import claims
from tilefold.bench.spec import OPERATORS, get_spec

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "src" / "tilefold"
SKIPPED = {
    "node_modules",
    "tilefold-demo",
    "build",
    "dist",
}  # and what is hidden: environments, caches, scratch copies
DOCUMENTS = sorted(
    path
    for path in ROOT.rglob("*.md")
    if not any(part in SKIPPED or part.startswith(".") for part in path.relative_to(ROOT).parts)
)
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)(?:\s+\"[^\"]*\")?\)")
SPAN = re.compile(r"(?<!`)`([^`]+)`(?!`)")
FENCE = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```", re.MULTILINE | re.DOTALL)


def label(path: Path) -> str:
    return str(path.relative_to(ROOT))


def anchors(path: Path) -> set[str]:
    """GitHub's anchors of the headings of a document."""
    headings = re.findall(
        r"^#{1,6}\s+(.*)$",
        FENCE.sub("", path.read_text(encoding="utf-8")),
        re.MULTILINE,
    )
    return {
        re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings
    }


def commands(path: Path) -> list[list[str]]:
    """The commands of a document as words: lines of its shell blocks, and code in its text that
    begins with one.
    """
    text = path.read_text(encoding="utf-8")
    spans = [span.replace("\n", " ") for span in SPAN.findall(FENCE.sub("", text))]
    return [*words_of(spans), *shell_commands(path)]


def shell_commands(path: Path) -> list[list[str]]:
    """The commands in the shell blocks of a document, as words."""
    lines: list[str] = []
    for language, body in FENCE.findall(path.read_text(encoding="utf-8")):
        if language in ("sh", "bash", "console", "shell"):
            lines += body.replace("\\\n", " ").splitlines()
    return words_of(lines)


def words_of(lines: list[str]) -> list[list[str]]:
    """The words of the lines that are commands, without comments and variables."""
    results: list[list[str]] = []
    for line in lines:
        words = line.removeprefix("$ ").partition(" #")[0].split()
        while words and re.fullmatch(r"[A-Z_]+=\S*", words[0]):  # variables of the environment
            words = words[1:]
        if "tilefold.cli" in words:  # the command of a launcher, such as torchrun
            words = ["tilefold", *words[words.index("tilefold.cli") + 1 :]]
        if words and words[0] in ("tilefold", "python", "torchrun"):
            results.append(words)
    return results


def options_of(script: Path) -> set[str]:
    """The options that a script gives to argparse, and those of the scripts beside it that it
    imports.
    """
    nodes = list(ast.walk(ast.parse(script.read_text(encoding="utf-8"))))
    texts = {
        node.value
        for node in nodes
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }
    imports = [
        (node.module, node.names)
        for node in nodes
        if isinstance(node, ast.ImportFrom) and node.module
    ]
    modules = [f"{module}.{alias.name}" for module, names in imports for alias in names] + [
        name for name, _ in imports
    ]
    folder, paths = script.parent.name, [module.split(".") for module in modules]
    shared = [
        script.with_name(f"{parts[1]}.py")
        for parts in paths
        if parts[0] == folder and len(parts) == 2
    ]
    result = {text for text in texts if text.startswith("--")}
    return result.union(*(options_of(path) for path in shared if path.exists()))


@pytest.mark.parametrize("path", DOCUMENTS, ids=label)
def test_relative_links_lead_to_files_and_headings_that_exist(path: Path) -> None:
    broken: list[str] = []
    for target in LINK.findall(FENCE.sub("", path.read_text(encoding="utf-8"))):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, fragment = target.partition("#")
        file = (path.parent / name) if name else path
        if not file.exists() or (
            fragment and file.suffix == ".md" and fragment not in anchors(file)
        ):
            broken.append(target)
    assert not broken, f"{label(path)}: broken links {broken}"


@pytest.mark.parametrize("path", DOCUMENTS, ids=label)
def test_commands_in_the_documents_have_the_verbs_and_options_of_the_program(path: Path) -> None:
    group = typer.main.get_command(cli.app)
    assert isinstance(group, typer.core.TyperGroup)
    for _, verb, *rest in (
        words for words in commands(path) if words[0] == "tilefold" and len(words) > 1
    ):
        if not re.match(r"[a-z]", verb):
            continue
        assert verb in group.commands, f"{label(path)}: tilefold {verb} does not exist"
        parameters = group.commands[verb].params
        known = {
            option
            for parameter in parameters
            for option in (*parameter.opts, *parameter.secondary_opts)
        }
        used = {word.partition("=")[0] for word in rest if word.startswith("--")} - {"--help"}
        assert used <= known, f"{label(path)}: tilefold {verb} has no option {sorted(used - known)}"
        if verb == "bench" and rest and re.match(r"[a-z]", rest[0]):
            assert rest[0] in (*OPERATORS, "claims"), (
                f"{label(path)}: there is no benchmark {rest[0]}"
            )


@pytest.mark.parametrize("path", DOCUMENTS, ids=label)
def test_commands_in_shell_blocks_have_every_option_that_the_program_needs(path: Path) -> None:
    group = typer.main.get_command(cli.app)
    assert isinstance(group, typer.core.TyperGroup)
    for words in shell_commands(path):
        verb = words[1] if len(words) > 1 else ""
        if words[0] != "tilefold" or verb not in group.commands or "--help" in words:
            continue
        options = {option.opts[0] for option in group.commands[verb].params if option.required}
        missing = {option for option in options if option.startswith("--")} - set(words)
        assert not missing, f"{label(path)}: tilefold {verb} needs {sorted(missing)}"


@pytest.mark.parametrize("path", DOCUMENTS, ids=label)
def test_scripts_in_the_documents_exist_and_have_the_options_that_they_are_given(
    path: Path,
) -> None:
    for words in (words for words in commands(path) if words[0] in ("python", "torchrun")):
        at = next(
            (
                i
                for i, word in enumerate(words)
                if re.match(r"(benchmarks|examples|tilefold)[./]", word)
            ),
            None,
        )
        if at is None:  # somebody else's
            continue
        name = words[at].removesuffix(".py").replace(".", "/")
        places = (
            folder / f"{name}{end}"
            for folder in (ROOT, ROOT / "src")
            for end in (".py", "/__main__.py")
        )
        script = next((place for place in places if place.exists()), None)
        assert script is not None, f"{label(path)}: {' '.join(words)}: {words[at]} does not exist"
        used = {word.partition("=")[0] for word in words[at + 1 :] if word.startswith("--")} - {
            "--help",
        }
        unknown = used - options_of(script)
        assert not unknown, f"{label(path)}: {words[at]} has no option {sorted(unknown)}"


@pytest.mark.parametrize("path", DOCUMENTS, ids=label)
def test_python_in_the_documents_parses(path: Path) -> None:
    for language, body in FENCE.findall(path.read_text(encoding="utf-8")):
        if language == "python":
            ast.parse(body)


def test_the_example_of_an_operator_in_the_readme_runs_on_this_machine(
    capsys: pytest.CaptureFixture[str],
) -> None:
    blocks = [
        b for language, b in FENCE.findall((ROOT / "README.md").read_text()) if language == "python"
    ]
    (example,) = [
        block for block in blocks if "SparseEncoder(" not in block
    ]  # that one downloads a model
    exec(compile(example, "README.md", "exec"), {})  # noqa: S102
    assert capsys.readouterr().out.strip()


def tables(path: Path) -> list[list[str]]:
    """The tables of a document, each the list of its lines."""
    result: list[list[str]] = [[]]
    for line in FENCE.sub("", path.read_text(encoding="utf-8")).splitlines():
        if line.startswith("|"):
            result[-1].append(line)
        elif result[-1]:
            result.append([])
    return [table for table in result if table]


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in re.split(r"(?<!\\)\|", line.strip().strip("|"))]


@pytest.mark.parametrize("path", [p for p in DOCUMENTS if tables(p)], ids=label)
def test_every_table_has_a_header_and_rows_of_its_width(path: Path) -> None:
    for table in tables(path):
        headed = len(table) > 2 and any(cells(table[0])) and re.fullmatch(r"[|:\- ]+", table[1])
        assert headed, f"{label(path)}: no header above {table[0]}"
        widths = {len(cells(line)) for line in table}
        assert len(widths) == 1, f"{label(path)}: rows of {sorted(widths)} cells below {table[0]}"


TIME, TRAINING, MEMORY = "forward_p50_ms", "forward_backward_p50_ms", "forward_backward_peak_mib"
PEERS = ("tilefold", "flash-maxsim", "late-interaction-kernels", "compile")
# Tables of docs/benchmarks.md by their first header: the file, and (implementation, column) of
# their last columns. Rows are those of the file, in its order; of several variants of a peer
# ("adasplash-v1", ...) the fastest is shown.
MEASURED = {
    "B x S x D x V": (
        "lsr_head.csv",
        [
            *((impl, TIME) for impl in ("tilefold", "gemm-full")),
            *(
                (impl, column)
                for column in (TRAINING, MEMORY)
                for impl in ("tilefold", "compile-max-first", "eager")
            ),
        ],
    ),
    "model": (
        "train_splade.csv",
        [
            (side, c)
            for c in ("largest_batch", "pairs_per_second", "step_p50_ms")
            for side in ("stock", "tilefold")
        ],
    ),
    "queries x tokens, documents x tokens": (
        "maxsim.csv",
        [*((impl, TIME) for impl in PEERS), *((impl, TRAINING) for impl in (*PEERS, "eager"))],
    ),
    "N, batch": (
        "entmax_attention.csv",
        [
            (i, c)
            for i in ("tilefold", "adasplash", "softmax-fa2", "softmax-cudnn")
            for c in (TIME, TRAINING)
        ],
    ),
}


@pytest.mark.parametrize("first", MEASURED)
def test_the_tables_of_benchmarks_hold_the_committed_results(first: str) -> None:
    file, columns = MEASURED[first]
    measured: dict[tuple[str, ...], dict[str, dict[str, str]]] = {}
    with (ROOT / "benchmarks" / "results" / "nvidia-h200" / file).open(
        newline="",
        encoding="utf-8",
    ) as lines:
        for row in csv.DictReader(lines):
            case = tuple(
                row.get(name, "")
                for name in ("case", "model", "length", "memory_gib", "checkpointing")
            )
            measured.setdefault(case, {})[row.get("impl") or row["side"]] = row
    (table,) = [
        table for table in tables(ROOT / "docs" / "benchmarks.md") if cells(table[0])[0] == first
    ]
    for line, (case, rows) in zip(table[2:], measured.items(), strict=True):
        numbers = [
            re.sub(r"[, ]|ms", "", number) for cell in cells(line) for number in cell.split(" / ")
        ]
        for text, (impl, column) in zip(numbers[-len(columns) :], columns, strict=True):
            peers = (
                row for name, row in rows.items() if name == impl or name.startswith(f"{impl}-v")
            )
            values = [float(row[column]) for row in peers if row[column]]
            shown = f"{case}, {impl}, {column}: the table shows {text}, measured was {values}"
            if text == "-":
                assert not values, shown
            else:
                half = 0.5 * 10 ** -len(text.partition(".")[2])
                assert abs(min(values) - float(text)) <= half + 1e-9, shown


def test_each_result_of_an_operator_in_the_readme_has_a_claim_with_committed_rows() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    operators = readme.partition("\n## The operators\n")[2].partition("\n## ")[0]
    prose = FENCE.sub("", operators)
    named = set(re.findall(r"\d[\d,.]*(?= (?:→|ms|MiB|to \d|pairs))", prose))
    shown: set[str] = set()
    for claim in (claim for claim in claims.CLAIMS if any(claim.shown)):
        rows = claims.read_rows(claims_table.RESULTS / claim.device / f"{claim.file}.csv")
        actual = claims.judge(claim, rows)
        for text, value in zip(claim.shown, (actual.baseline, actual.ours), strict=True):
            half = 0.5 * 10 ** -len(text.partition(".")[2])
            assert abs(float(text.replace(",", "")) - value) <= half + 1e-9, (claim, text, value)
            assert text in operators
            shown.add(text)
    assert len(shown) >= 14 and named <= shown
    rows = claims.read_rows(claims_table.RESULTS / claims.H200 / "compare_triton_3_9.csv")
    ratios = {
        row["case"]: float(row["ratio"])
        for row in rows
        if row["phase"] == "forward_backward" and row["impl"] == "tilefold"
    }
    cases = ("16x512x768x250002-dense", "in-batch-64x1024-64x1024", "4x16384-correlated-causal")
    largest_change = re.search(r"changes these times by at most (\d+)%", operators)
    assert largest_change is not None
    assert int(largest_change[1]) == round(100 * max(abs(ratios[case] - 1) for case in cases))


def test_the_page_of_claims_has_the_table_of_the_committed_results() -> None:
    page = (ROOT / "benchmarks" / "notes" / "claims.md").read_text(encoding="utf-8").splitlines()
    assert [line for line in page if line.startswith("|")] == claims_table.table()


def test_claims_name_shapes_and_implementations_that_benchmarks_have() -> None:
    measured = claims.implementations_by_case("cuda") | {
        f"{op} cpu": each for op, each in claims.implementations_by_case("cpu").items()
    }
    for op, cases in measured.items():
        spec = get_spec(op.removesuffix(" cpu"))
        assert all(
            spec.case(name).device == ("cpu" if op.endswith("cpu") else "cuda") for name in cases
        )
        assert all(
            {spec.implementation(name).name for name in impls} == impls for impls in cases.values()
        )
    assert {claim.column for claim in claims.CLAIMS} <= claims.COLUMNS.keys()


def room(path: Path) -> Path:
    """The folder of the next README above a file."""
    return next(folder for folder in path.parents if (folder / "README.md").is_file())


def named(readme: Path) -> list[str]:
    """Names and patterns in the first cells of the tables whose first column is headed "file"."""
    results: list[str] = []
    in_table = False
    for line in readme.read_text(encoding="utf-8").splitlines():
        first = line.split("|")[1].strip() if line.startswith("|") else ""
        in_table = bool(first) and (in_table or first == "file")
        results += re.findall(r"`([^`]+)`", first) if in_table else []
    return results


def missing(folder: Path) -> list[str]:
    """Files below a folder that the README of their room does not name."""
    files = [path for path in folder.rglob("*.py") if path.name != "__init__.py"]
    listed: dict[Path, set[Path]] = {room_folder: set() for room_folder in map(room, files)}
    for room_folder, paths in listed.items():
        paths.update(
            path for name in named(room_folder / "README.md") for path in room_folder.glob(name)
        )
    return sorted(
        str(path.relative_to(PACKAGE)) for path in files if path not in listed[room(path)]
    )


def test_the_tables_of_rooms_name_every_file_and_no_other() -> None:
    assert missing(PACKAGE) == []
    names = [
        (readme.parent, name) for readme in PACKAGE.rglob("README.md") for name in named(readme)
    ]
    assert [(folder, name) for folder, name in names if not any(folder.glob(name))] == []


def test_the_python_names_of_the_migration_tables_exist() -> None:
    page = (ROOT / "docs" / "migration.md").read_text(encoding="utf-8")
    (imports,) = [body for language, body in FENCE.findall(page) if language == "python"]
    namespace: dict[str, Any] = {}
    exec(compile(imports, "docs/migration.md", "exec"), namespace)  # noqa: S102
    retrieval_names = set(re.findall(r"\br\.(\w+)", page))
    assert retrieval_names
    missing_names = {name for name in retrieval_names if not hasattr(namespace["r"], name)}
    assert not missing_names, f"docs/migration.md: tilefold.retrieval has no {missing_names}"


def test_the_blocks_of_the_python_document_run(
    tmp_path: Path,
    monkeypatch: Any,
    capsys: Any,
) -> None:
    backbone = str(small_masked_lm(tmp_path / "backbone"))
    monkeypatch.chdir(tmp_path)
    fences = FENCE.findall((ROOT / "docs" / "python.md").read_text())
    blocks = [body for kind, body in fences if kind == "python"]
    (documents,) = [body for kind, body in fences if kind == "json"]
    (tmp_path / "my-articles.jsonl").write_text(documents)
    namespace: dict[str, object] = {}
    for number, block in enumerate(blocks):
        small = re.sub(r"max_steps=\d+", "max_steps=2", block.replace('"minilm"', repr(backbone)))
        exec(compile(small, f"docs/python.md, block {number}", "exec"), namespace)  # noqa: S102
    printed = capsys.readouterr().out
    assert printed.startswith("1 Lost cards "), "the first block searches the file"
    assert f"(6, {VOCABULARY}) True" in printed and "fused {'nDCG@10'" in printed
    points = json.loads((tmp_path / "points.json").read_text())["points"]
    assert len(points) == 6 and points[0]["payload"] == {"document": "cards"}
    articles = (tmp_path / "articles.jsonl").read_text().splitlines()
    assert len(articles) == 6 and not {"[CLS]", "[SEP]"} & json.loads(articles[0])["vector"].keys()
