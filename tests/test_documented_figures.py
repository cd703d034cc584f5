"""Figures of user pages and of the notes behind them are those of committed rows."""

from __future__ import annotations

import csv
import re
import statistics
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks import recipes_table
from tilefold.recipes import CausalSpec

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
H200 = "nvidia-h200"
EPYC = "cpu-amd-epyc-2-threads"
EPYC_ONE_THREAD = "cpu-amd-epyc-1-threads"
NOTES_ON_RECIPES = ROOT / "benchmarks" / "notes" / "recipes.md"


def decimals(text: str) -> int:
    """Return how many decimals a printed number has."""
    return len(text.partition(".")[2])


def matching_rows(device: str, file: str, **cells: str) -> list[dict[str, str]]:
    """Return the rows of a results file whose cells have these values."""
    path = RESULTS / device / f"{file}.csv"
    with path.open(newline="", encoding="utf-8") as lines:
        rows = [
            row
            for row in csv.DictReader(lines)
            if all(row[name] == value for name, value in cells.items())
        ]
    assert rows, f"{path}: no row with {cells}"
    return rows


def page_path(page: str) -> Path:
    """Return the path of the README or of a page of docs/."""
    return ROOT / page if page == "README.md" else ROOT / "docs" / page


def row_of_table(page: str, label: str) -> list[str]:
    """Return the cells of the one table row of a page that begins with a label."""
    text = page_path(page).read_text(encoding="utf-8")
    lines = [line for line in text.splitlines() if line.startswith(f"| {label} |")]
    assert len(lines) == 1, f"{page}: {len(lines)} rows begin with {label!r}"
    return [cell.strip() for cell in lines[0].strip("|").split("|")]


def check_figure(printed: str, values: list[float]) -> None:
    """Fail unless a printed number is one of the values, rounded."""
    number = re.sub(r"[^\d.]", "", printed)
    half_of_last_decimal = 0.5 * 10 ** -decimals(number)
    close = [value for value in values if abs(value - float(number)) <= half_of_last_decimal + 1e-9]
    assert close, f"the page prints {printed}, the rows have {values}"


@pytest.mark.parametrize(
    ("label", "case"),
    [
        pytest.param("BERT-base, V = 30,522", "bert-base", id="BERT-base"),
        pytest.param("BERT-base, V = 250,002", "vocabulary-250k", id="a large vocabulary"),
        pytest.param("MiniLM, V = 30,522", "minilm", id="MiniLM"),
    ],
)
def test_rates_of_encoding(label: str, case: str) -> None:
    cells = row_of_table("performance.md", label)
    for printed, job in zip(
        cells[1:],
        ("stock encode_document", "encode_collection, to Parquet"),
        strict=True,
    ):
        rows = matching_rows(H200, "encode", case=case, what=job)
        check_figure(printed, [float(row["docs_per_s"]) for row in rows])


@pytest.mark.parametrize("shape", ["8x512x4096x128256", "32x256x4096x32000", "8x512x2048x128256"])
def test_times_of_the_heads_of_language_models(shape: str) -> None:
    label = " x ".join(f"{int(size):,}" for size in shape.split("x"))
    tilefold = {"implementation": "tilefold", "role": "chosen"}
    columns = (
        tilefold | {"layout": "full"},
        tilefold | {"layout": "masked"},
        {"implementation": "torch.mm"},
        {"implementation": "torch.compile, maximum first"},
    )
    cells = row_of_table("benchmarks.md", label)
    for printed, column in zip(cells[1:], columns, strict=True):
        rows = matching_rows(H200, "lsr_head_long_rows", case=shape, **column)
        check_figure(printed, [float(row["p50_ms"]) for row in rows])


def test_times_of_the_screen() -> None:
    text = page_path("benchmarks.md").read_text(encoding="utf-8")
    printed = re.search(
        r"takes (\S+) ms, while the matrix product of the same run takes (\S+) ms", text
    )
    assert printed
    columns = (
        {"implementation": "tilefold, screened", "role": "chosen"},
        {"implementation": "torch.mm"},
    )
    for time, column in zip(printed.groups(), columns, strict=True):
        case = "8x512x4096x128256 trained"
        rows = matching_rows(H200, "lsr_head_long_rows", case=case, layout="full", **column)
        check_figure(time, [float(row["p50_ms"]) for row in rows])


@pytest.mark.parametrize(
    ("label", "job"),
    [
        pytest.param("stock `encode_query`", "stock encode_query", id="stock"),
        pytest.param(
            "[ONNX graph](integrations.md#as-an-onnx-graph), fp32",
            "mini-fp32 encode_query",
            id="ONNX graph",
        ),
        pytest.param(
            "ONNX graph, `--quantize int8`",
            "mini-int8 encode_query",
            id="ONNX graph in 8 bits",
        ),
    ],
)
def test_times_of_a_query_on_a_cpu(label: str, job: str) -> None:
    rows = matching_rows(EPYC_ONE_THREAD, "query_on_cpu", what=job)
    check_figure(
        row_of_table("performance.md", label)[1],
        [float(row["cpu_p50_ms"]) for row in rows],
    )


@pytest.mark.parametrize(
    ("label", "case", "work"),
    [
        pytest.param("one SPLADE query, BERT-base", "bert-base", "one query", id="SPLADE"),
        pytest.param(
            "one ColBERT query, BERT-base", "bert-base", "one ColBERT query", id="ColBERT"
        ),
        pytest.param("one SPLADE query, MiniLM", "minilm", "one query", id="MiniLM"),
    ],
)
def test_times_of_a_query_on_a_gpu(label: str, case: str, work: str) -> None:
    cells = row_of_table("performance.md", label)
    for printed, way in zip(cells[1:], ("stock", "tilefold"), strict=True):
        rows = matching_rows(H200, "queries", case=case, work=work, way=way)
        check_figure(printed, [float(row["p50_ms"]) for row in rows])


@pytest.mark.parametrize(
    ("label", "case"),
    [
        pytest.param("SPLADE, V = 30,522, 128 pairs", "ragged-128", id="SPLADE"),
        pytest.param(
            "SPLADE, V = 250,002, 128 pairs (stock: only 64 pairs fit)",
            "ragged-128-large",
            id="a large vocabulary",
        ),
        pytest.param("ColBERT, 128 pairs", "colbert-128", id="ColBERT"),
        pytest.param("SPLADE, 128 pairs, documents of 240 tokens", "full-128", id="full length"),
    ],
)
def test_times_of_training_steps(label: str, case: str) -> None:
    cells = row_of_table("performance.md", label)
    sides = ("stock", "packed", "graphs", "compiled")
    for printed, side in zip(cells[1:], sides, strict=True):
        (row,) = matching_rows(H200, "train", case=case, side=side)
        check_figure(printed, [float(row["step_ms"]), float(row["median_ms"])])


@pytest.mark.parametrize(
    ("label", "work", "column", "way"),
    [
        pytest.param("documents per second", "encode", "docs_s", "packed", id="encoding"),
        pytest.param("training step", "step of 64 pairs", "p50_ms", "CUDA graphs", id="step"),
        pytest.param(
            "memory of the step",
            "step of 64 pairs",
            "peak_gib",
            "CUDA graphs",
            id="memory of a step",
        ),
    ],
)
def test_figures_of_decoders(label: str, work: str, column: str, way: str) -> None:
    cells = row_of_decoders(label)
    for printed, name in zip(cells[1:], ("stock", "padded", way, "compiled layers"), strict=True):
        (row,) = matching_rows(H200, "decoders", case="llama-1b", work=work, way=name)
        check_figure(printed, [float(row[column])])


@pytest.mark.parametrize(
    ("sentence", "case", "work", "way"),
    [
        pytest.param(
            r"a step of 32 pairs takes (\d+) ms, while the stock step takes (\d+) ms",
            "llama-1b",
            "step of 32 pairs",
            "compiled layers",
            id="all weights",
        ),
        pytest.param(
            r"With LoRA, a step of 64 pairs takes (\d+) ms, while the stock step takes (\d+) ms",
            "llama-1b-lora",
            "step of 64 pairs",
            "CUDA graphs",
            id="LoRA",
        ),
    ],
)
def test_steps_of_decoders_in_sentences(sentence: str, case: str, work: str, way: str) -> None:
    printed = re.search(sentence, page_path("performance.md").read_text(encoding="utf-8"))
    assert printed
    for time, name in zip(printed.groups(), (way, "stock"), strict=True):
        (row,) = matching_rows(H200, "decoders", case=case, work=work, way=name)
        check_figure(time, [float(row["p50_ms"])])


def test_a_step_of_many_pairs_of_decoders_in_a_sentence() -> None:
    text = page_path("performance.md").read_text(encoding="utf-8")
    printed = re.search(r"a step of 1,024 pairs takes ([\d.]+) s and needs ([\d.]+) GiB", text)
    assert printed
    (row,) = matching_rows(H200, "decoders", case="llama-1b-cached", work="step of 1024 pairs")
    seconds, gibibytes = printed.groups()
    check_figure(seconds, [float(row["p50_ms"]) / 1000])
    check_figure(gibibytes, [float(row["peak_gib"])])


def test_the_rate_of_decoders_in_fp8_in_a_sentence() -> None:
    text = page_path("performance.md").read_text(encoding="utf-8")
    printed = re.search(r"tilefold encodes ([\d,]+) documents per second", text)
    assert printed
    (row,) = matching_rows(H200, "fp8_encoders", model="llama-1b", layers="compiled", dtype="fp8")
    assert printed.group(1).replace(",", "") == row["docs_s"]


def row_of_decoders(label: str) -> list[str]:
    """Return the cells of a row of the table of decoders, whose labels also begin other tables."""
    section = page_path("performance.md").read_text(encoding="utf-8").split("## Decoders")[1]
    line = next(line for line in section.splitlines() if line.startswith(f"| {label} |"))
    return [cell.strip() for cell in line.strip("|").split("|")]


@pytest.mark.parametrize(
    ("label", "case"),
    [
        pytest.param("train SPLADE: a step of 128 pairs", "ragged-128", id="SPLADE"),
        pytest.param(
            "train SPLADE, V = 250,002: a step of 128 pairs (stock: 64 fit)",
            "ragged-128-large",
            id="a large vocabulary",
        ),
        pytest.param("train ColBERT: a step of 128 pairs", "colbert-128", id="ColBERT"),
        pytest.param(
            "train SPLADE: a step of 128 documents of 240 tokens, without padding",
            "full-128",
            id="full length",
        ),
    ],
)
def test_training_steps_of_the_readme(label: str, case: str) -> None:
    _, stock, accelerated, ratio = row_of_table("README.md", label)
    (stock_row,) = matching_rows(H200, "train", case=case, side="stock")
    (accelerated_row,) = matching_rows(H200, "train", case=case, side="compiled")
    check_figure(stock, [float(stock_row["step_ms"]), float(stock_row["median_ms"])])
    check_figure(accelerated, [float(accelerated_row["step_ms"])])
    check_figure(ratio, [float(accelerated_row["ratio"])])


def test_encoding_of_documents_in_the_readme() -> None:
    _, stock, encoded, ratio = row_of_table(
        "README.md",
        "encode documents with SPLADE, per second",
    )
    (stock_row,) = matching_rows(H200, "encode", case="bert-base", what="stock encode_document")
    (encoded_row,) = matching_rows(
        H200,
        "encode",
        case="bert-base",
        what="encode_collection, to Parquet",
    )
    check_figure(stock, [float(stock_row["docs_per_s"])])
    check_figure(encoded, [float(encoded_row["docs_per_s"])])
    check_figure(ratio, [float(encoded_row["docs_per_s"]) / float(stock_row["docs_per_s"])])


def test_encoding_of_a_query_in_the_readme() -> None:
    _, stock, accelerated, ratio = row_of_table("README.md", "encode one SPLADE query")
    (stock_row,) = matching_rows(H200, "queries", case="bert-base", work="one query", way="stock")
    (accelerated_row,) = matching_rows(
        H200,
        "queries",
        case="bert-base",
        work="one query",
        way="tilefold",
    )
    check_figure(stock, [float(stock_row["p50_ms"])])
    check_figure(accelerated, [float(accelerated_row["p50_ms"])])
    check_figure(ratio, [float(stock_row["p50_ms"]) / float(accelerated_row["p50_ms"])])


@pytest.mark.parametrize(
    ("label", "documents", "engine"),
    [
        pytest.param("100,000 | exact", "100000", "exact", id="exact, 100,000"),
        pytest.param("100,000 | Seismic", "100000", "seismic", id="Seismic, 100,000"),
        pytest.param("1,000,000 | exact", "1000000", "exact", id="exact, a million"),
        pytest.param("1,000,000 | Seismic", "1000000", "seismic", id="Seismic, a million"),
    ],
)
def test_times_of_searching(label: str, documents: str, engine: str) -> None:
    _, _, *cells = row_of_table("performance.md", label)
    rows = matching_rows(EPYC, "search", documents=documents, engine=engine)
    columns = ("build_s", "disk_mib", "p50_ms", "recall_at_10")
    for printed, column in zip(cells, columns, strict=True):
        check_figure(printed, [float(row[column]) for row in rows])


@pytest.mark.parametrize(
    "recipe",
    [
        "splade-asm",
        "splade-dmlp",
        "splade",
        "splade-doc",
        "splade-qmlp",
        "colbert",
        "splade-v2",
        "splade-v3",
        "inference-free",
        "unicoil",
    ],
)
def test_results_of_recipes_are_means_over_seeds(recipe: str) -> None:
    text = (ROOT / "docs" / "recipes.md").read_text(encoding="utf-8")
    measured = text.partition("## Measured here")[2]
    (line,) = [line for line in measured.splitlines() if line.startswith(f"| `{recipe}` |")]
    cells = [cell.strip() for cell in line.strip("|").split("|")]
    rows = matching_rows(H200, "recipes", data="scifact", recipe=recipe, base="minilm", steps="300")
    columns = ("start_nDCG@10", "nDCG@10", "query_terms", "document_terms", "search_ms")
    for printed, column in zip(cells[1:], columns, strict=True):
        if printed:
            check_figure(printed, [statistics.fmean(float(row[column]) for row in rows)])


@pytest.mark.parametrize(
    ("page", "sentence", "device", "file", "cells", "column"),
    [
        pytest.param(
            "performance.md",
            r"Two H200s encode ([\d,]+) documents per second",
            H200,
            "encode_two_gpus",
            {"turns": "4.12 4.18"},
            "docs_per_s",
            id="encoding with two GPUs",
        ),
        pytest.param(
            "performance.md",
            r"BERT-base encodes ([\d,]+) queries per second",
            H200,
            "queries",
            {"case": "bert-base", "work": "32,768 queries", "way": "tilefold"},
            "queries_s",
            id="many queries, BERT-base",
        ),
        pytest.param(
            "performance.md",
            r"and MiniLM ([\d,]+)\.",
            H200,
            "queries",
            {"case": "minilm", "work": "32,768 queries", "way": "tilefold"},
            "queries_s",
            id="many queries, MiniLM",
        ),
        pytest.param(
            "performance.md",
            r"train ([\d.]+) times as many SPLADE pairs",
            H200,
            "train_scale",
            {"run": "splade-graphs", "devices": "2"},
            "x_one",
            id="training on two GPUs, SPLADE",
        ),
        pytest.param(
            "performance.md",
            r"and ([\d.]+) times as many ColBERT pairs",
            H200,
            "train_scale",
            {"run": "colbert-graphs", "devices": "2"},
            "x_one",
            id="training on two GPUs, ColBERT",
        ),
        pytest.param(
            "tutorial-gpus.md",
            r"two H200s train ([\d.]+) times as many SPLADE pairs",
            H200,
            "train_scale",
            {"run": "splade-graphs", "devices": "2"},
            "x_one",
            id="training on two GPUs, in the tutorial",
        ),
        pytest.param(
            "tutorial-gpus.md",
            r"Two H200s encode ([\d.]+) times as many documents",
            H200,
            "encode_two_gpus",
            {"case": "bert-base", "devices": "2"},
            "x_one",
            id="encoding with two GPUs, in the tutorial",
        ),
        pytest.param(
            "performance.md",
            r"512 queries over a million documents in ([\d.]+) ms",
            H200,
            "search_gpu",
            {"case": "sparse-1m", "way": "sparse_topk, batch"},
            "p50_ms",
            id="a batch of sparse queries on a GPU",
        ),
        pytest.param(
            "performance.md",
            r"in int8 takes ([\d.]+) ms for one query",
            H200,
            "search_gpu",
            {"case": "maxsim-1m", "way": "maxsim_topk, 1"},
            "p50_ms",
            id="late interaction over a million documents",
        ),
        pytest.param(
            "performance.md",
            r"Over 8\.8 million of these documents, one query takes ([\d.]+) ms",
            H200,
            "search_gpu",
            {"case": "maxsim-8.8m", "way": "maxsim_topk, 1"},
            "p50_ms",
            id="late interaction over 8.8 million documents",
        ),
        pytest.param(
            "choosing.md",
            r"\| `exact` \| exact \| ([\d.]+) ms for 100,000 documents",
            EPYC,
            "search",
            {"documents": "100000", "engine": "exact"},
            "p50_ms",
            id="choosing: exact, 100,000 documents",
        ),
        pytest.param(
            "choosing.md",
            r"100,000 documents, ([\d.]+) ms for a million",
            EPYC,
            "search",
            {"documents": "1000000", "engine": "exact"},
            "p50_ms",
            id="choosing: exact, a million documents",
        ),
        pytest.param(
            "choosing.md",
            r"512 queries over a million in ([\d.]+) ms",
            H200,
            "search_gpu",
            {"case": "sparse-1m", "way": "sparse_topk, batch"},
            "p50_ms",
            id="choosing: exact, on a GPU",
        ),
        pytest.param(
            "choosing.md",
            r"\| `seismic` \| approximate \| ([\d.]+) ms for a million",
            EPYC,
            "search",
            {"documents": "1000000", "engine": "seismic"},
            "p50_ms",
            id="choosing: Seismic",
        ),
        pytest.param(
            "choosing.md",
            r"\| `exact` \| ([\d,]+) MiB \|",
            EPYC,
            "search",
            {"documents": "1000000", "engine": "exact"},
            "disk_mib",
            id="choosing: disk of exact",
        ),
        pytest.param(
            "choosing.md",
            r"\| `exact` \| [\d,]+ MiB \| ([\d,]+) MiB \|",
            EPYC,
            "search",
            {"documents": "1000000", "engine": "exact"},
            "resident_mib",
            id="choosing: memory of exact",
        ),
        pytest.param(
            "choosing.md",
            r"\| `seismic` \| ([\d,]+) MiB \|",
            EPYC,
            "search",
            {"documents": "1000000", "engine": "seismic"},
            "disk_mib",
            id="choosing: disk of seismic",
        ),
        pytest.param(
            "choosing.md",
            r"\| `seismic` \| [\d,]+ MiB \| ([\d,]+) MiB \|",
            EPYC,
            "search",
            {"documents": "1000000", "engine": "seismic"},
            "resident_mib",
            id="choosing: memory of seismic",
        ),
        pytest.param(
            "choosing.md",
            r"a million documents of 64 tokens in ([\d.]+) ms",
            H200,
            "search_gpu",
            {"case": "maxsim-1m", "way": "maxsim_topk, 1"},
            "p50_ms",
            id="choosing: late interaction on a GPU",
        ),
        pytest.param(
            "choosing.md",
            r"\[([\d,]+) documents per second\]",
            H200,
            "encode",
            {"case": "bert-base", "what": "encode_collection, to Parquet"},
            "docs_per_s",
            id="choosing: encoding",
        ),
        *(
            pytest.param(
                "comparison.md",
                sentence,
                EPYC,
                "search",
                {"documents": "1000000", "engine": engine},
                column,
                id=f"comparison: {column} of {engine}",
            )
            for engine, column, sentence in (
                ("exact", "p50_ms", r"\| `exact` \| ([\d.]+) ms"),
                ("exact", "build_s", r"\| `exact` \| [\d.]+ ms \| ([\d.]+) s"),
                ("exact", "disk_mib", r"\| `exact` \| [\d.]+ ms \| [\d.]+ s \| ([\d,]+) MiB"),
                ("seismic", "p50_ms", r"sets it \| ([\d.]+) ms"),
                ("seismic", "build_s", r"sets it \| [\d.]+ ms \| ([\d.]+) s"),
                ("seismic", "recall_at_10", r"1,586 MiB \| ([\d.]+) \|"),
                ("scipy", "p50_ms", r"all documents \| ([\d.]+) ms"),
            )
        ),
        pytest.param(
            "serve.md",
            r"the same measurement gives (\d+) queries a second",
            EPYC,
            "serve_load",
            {"server": "tilefold", "clients": "64"},
            "requests_s",
            id="serving 64 clients from two cores",
        ),
    ],
)
def test_figures_in_sentences(
    page: str,
    sentence: str,
    device: str,
    file: str,
    cells: dict[str, str],
    column: str,
) -> None:
    text = " ".join((ROOT / "docs" / page).read_text(encoding="utf-8").split())
    printed = re.search(sentence, text)
    assert printed, f"docs/{page} has no sentence like {sentence!r}"
    rows = matching_rows(device, file, **cells)
    check_figure(printed[1], [float(row[column]) for row in rows if row[column]])


def test_the_notes_on_recipes_have_the_table_of_the_committed_rows(
    capsys: pytest.CaptureFixture[str],
) -> None:
    recipes_table.main([str(RESULTS / H200 / "recipes.csv")])
    printed = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| `")]
    notes = NOTES_ON_RECIPES.read_text(encoding="utf-8")
    table = notes.partition("| recipe | steps, seeds |")[2].partition("\n\n")[0]
    documented = [line for line in table.splitlines() if line.startswith("| `")]
    # the notes name options in words, so that only the other cells are compared
    assert sorted(line.split(" | ", 1)[1] for line in documented) == sorted(
        line.split(" | ", 1)[1] for line in printed
    )


@pytest.mark.parametrize(
    ("documents", "beginning"),
    [
        pytest.param("10000", "| 10,000 | exact |", id="10,000 documents"),
        pytest.param("100000", "| 100,000 | exact |", id="100,000 documents"),
        pytest.param("1000000", "| 1,000,000 | exact |", id="a million documents"),
    ],
)
def test_the_notes_on_performance_have_the_committed_times_of_the_exact_index(
    documents: str,
    beginning: str,
) -> None:
    notes = (ROOT / "benchmarks" / "notes" / "performance.md").read_text(encoding="utf-8")
    (line,) = [line for line in notes.splitlines() if line.startswith(beginning)]
    _, _, build, _, _, load_and_first, p50_and_p99, _ = (
        cell.strip() for cell in line.strip("|").split("|")
    )
    (row,) = matching_rows(EPYC, "search", documents=documents, engine="exact")
    printed = [build, *load_and_first.split(", "), *p50_and_p99.split(", ")]
    columns = ("build_s", "load_s", "first_ms", "p50_ms", "p99_ms")
    for figure, column in zip(printed, columns, strict=True):
        check_figure(figure, [float(row[column])])


def test_figures_of_trunks_in_fp8() -> None:
    (row,) = matching_rows(EPYC_ONE_THREAD, "fp8_trunk", data="scifact-900", model="minilm")
    page = (ROOT / "docs" / "integrations.md").read_text(encoding="utf-8")
    for pattern, column in (
        (r"an nDCG@10 of (\.\d+) in bf16 and \.\d+ with documents in fp8", "bf16_ndcg10"),
        (r"an nDCG@10 of \.\d+ in bf16 and (\.\d+) with documents in fp8", "fp8_ndcg10"),
        (r"in fp8, on (\d+) documents of SciFact", "documents"),
        (r"standard error of the difference is (\.\d+) \(\[rows\]", "standard_error"),
    ):
        (figure,) = re.findall(pattern, page)
        assert float(figure) == round(float(row[column]), decimals(figure))


# Names of networks in the tables of invariant vectors.
INVARIANT_NETWORKS = {
    "minilm": "MiniLM",
    "minilm-random": "MiniLM, random weights",
    "bert": "BERT-base",
    "modernbert": "ModernBERT-base",
    "llama": "Llama, 1B",
    "tiny": "tiny BERT",
    "tiny-modernbert": "tiny ModernBERT",
    "tiny-llama": "tiny Llama",
}


def invariance_rows(name: str) -> list[tuple[str, dict[str, str]]]:
    """Return the rows of all files of a name, each with a link to its file.

    Args:
        name: the name of the files of results.
    """
    linked_rows = []
    for path in sorted((ROOT / "benchmarks" / "results").glob(f"*/{name}")):
        with path.open(encoding="utf-8") as file:
            for row in csv.DictReader(file):
                relative_path = path.relative_to(ROOT).as_posix()
                network = INVARIANT_NETWORKS[row["network"]]
                linked_rows.append((f"[{network}](../{relative_path})", row))
    return linked_rows


def device_of(row: dict[str, str]) -> str:
    """Return the device of a row, with the release of Triton or a CPU's number of threads."""
    if "NVIDIA" in row["device"]:
        major, minor, _ = row["triton"].split(".")
        return f"{row['device']}, Triton {major}.{minor}"
    n_threads = int(row["threads"])
    return f"{row['device']}, {n_threads} thread{'s' if n_threads > 1 else ''}"


def count_lines(linked_rows: list[tuple[str, dict[str, str]]]) -> list[str]:
    """Return the lines of the page for rows of counts, one for all dtypes of a network.

    Args:
        linked_rows: the rows, each with the name of its network and a link to the file.
    """
    rows_of_line: dict[tuple[str, str, str], list[dict[str, str]]] = {}
    for link, row in linked_rows:
        rows_of_line.setdefault((device_of(row), link, row["layers"]), []).append(row)
    lines = []
    for names, rows in rows_of_line.items():
        dtypes = ", ".join(row["dtype"] for row in rows)
        sums = {
            column: f"{sum(int(row[column]) for row in rows):,}"
            for column in (
                "compositions",
                "rows",
                "invariant_differing",
                "differing",
                "ordinary_rows",
            )
        }
        cells = (
            *names,
            dtypes,
            sums["compositions"],
            sums["rows"],
            sums["invariant_differing"],
            f"{sums['differing']} of {sums['ordinary_rows']}",
        )
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def time_lines(linked_rows: list[tuple[str, dict[str, str]]]) -> list[str]:
    """Return the lines of the page for rows of times.

    Args:
        linked_rows: the rows, each with the name of its network and a link to the file.
    """
    lines = []
    for link, row in linked_rows:
        cells = (
            device_of(row),
            link,
            row["layers"],
            row["dtype"],
            f"{float(row['throughput']):.2f}".removeprefix("0"),
            f"{float(row['query_time']):.2f}".removeprefix("0"),
        )
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def test_figures_of_encoded_pages() -> None:
    text = page_path("performance.md").read_text(encoding="utf-8")
    printed = re.search(r"ColPali computes ([\d.]+) pages per second", text)
    assert printed
    (trunk,) = matching_rows(H200, "pages", work="trunk alone")
    assert printed.group(1) == trunk["pages_s"]
    printed = re.search(r"encodes ([\d.]+) pages per second with (\d+) workers", text)
    assert printed
    (encoded,) = matching_rows(H200, "pages", work="encode", workers=printed.group(2))
    assert printed.group(1) == encoded["pages_s"]


def test_figures_of_trained_page_retrievers() -> None:
    text = NOTES_ON_RECIPES.read_text(encoding="utf-8")
    fused_results = re.findall(r"nDCG@10 is (\.\d+) ± (\.\d+) with fused scores", text)
    stock_results = re.findall(r"It is (\.\d+) ± (\.\d+) with the scores of sent", text)
    rows_of_devices = [
        matching_rows(EPYC_ONE_THREAD, "page_retriever", form="small", steps="500"),
        matching_rows(H200, "page_retriever", form="small", steps="500"),
    ]
    seeds_of_devices = (8, 3)
    printed_of_devices = zip(fused_results, stock_results, strict=True)
    for rows, n_seeds, printed in zip(
        rows_of_devices, seeds_of_devices, printed_of_devices, strict=True
    ):
        for scores, (mean, error) in zip(("fused", "stock"), printed, strict=True):
            values = [float(row["nDCG@10"]) for row in rows if row["scores"] == scores]
            assert len(values) == n_seeds
            check_figure(mean, [statistics.fmean(values)])
            check_figure(error, [statistics.stdev(values) / len(values) ** 0.5])
    page = page_path("recipes.md").read_text(encoding="utf-8")
    assert re.findall(r"nDCG@10 is (\.\d+) ± (\.\d+) with fused scores", page) == fused_results[:1]
    chance = re.search(r"random order have an nDCG@10 of (\.\d+)", text)
    seconds = re.search(r"training takes (\d+) to (\d+) s", text)
    assert chance
    assert seconds
    check_figure(chance.group(1), [float(row["chance_nDCG@10"]) for row in rows_of_devices[1]])
    measured = [int(row["train_seconds"]) for row in rows_of_devices[1]]
    assert seconds.groups() == (str(min(measured)), str(max(measured)))


@pytest.mark.parametrize(
    ("name", "lines_of"),
    [
        pytest.param("invariance.csv", count_lines, id="counts"),
        pytest.param("invariance_times.csv", time_lines, id="times"),
    ],
)
def test_the_tables_of_invariant_vectors_have_the_measured_rows_and_no_others(
    name: str,
    lines_of: Callable[[list[tuple[str, dict[str, str]]]], list[str]],
) -> None:
    page = (ROOT / "docs" / "numerics.md").read_text(encoding="utf-8")
    table = [line for line in page.splitlines() if f"/{name})" in line]
    assert table
    assert sorted(table) == sorted(lines_of(invariance_rows(name)))


def test_no_measured_vector_of_an_invariant_model_differs() -> None:
    rows = [row for _, row in invariance_rows("invariance.csv")]
    assert {row["invariant_differing"] for row in rows} == {"0"}


@pytest.mark.parametrize(
    ("ending", "pattern"),
    [
        pytest.param("batch_size=16", r"to (\.\d+) ± (\.\d+) on packed tokens", id="packed"),
        pytest.param("fused=false", r"to (\.\d+) ± (\.\d+) with the stock model", id="padded"),
    ],
)
def test_figures_of_the_small_decoder(ending: str, pattern: str) -> None:
    rows = matching_rows(EPYC_ONE_THREAD, "recipes", data="scifact-400", base="adapted")
    values = [float(row["nDCG@10"]) for row in rows if row["recipe"].endswith(ending)]
    ((mean, deviation),) = re.findall(pattern, NOTES_ON_RECIPES.read_text(encoding="utf-8"))
    check_figure(mean, [statistics.fmean(values)])
    check_figure(deviation, [statistics.stdev(values)])
    assert mean in CausalSpec.measured
    (start,) = {row["start_nDCG@10"] for row in rows}
    check_figure(re.findall(r"from an nDCG@10 of (\.\d+)", CausalSpec.measured)[0], [float(start)])
    assert min(values) > float(start)
