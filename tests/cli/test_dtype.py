"""The option ``--dtype``: which commands have it, and what they print and record."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.cli.program import Call, done, fails, measured, run_steps
from tests.serve.running import serving
from tilefold._internal.precision import inference_precision
from tilefold.cli._options import DtypeOptions
from tilefold.cli.encode import EncodeRequest
from tilefold.cli.evaluate import EvaluateRequest
from tilefold.cli.mine import MineRequest, ScoreRequest
from tilefold.cli.search import SearchCommandRequest
from tilefold.cli.serve import ServeRequest, _load
from tilefold.retrieval import read_manifest, read_training_rows

needs_cpu = pytest.mark.skipif(
    torch.cuda.is_available(),
    reason="the default of a GPU may be another dtype",
)


@pytest.fixture(scope="module")
def in_bf16(work: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the vectors of the collection in bf16, and an index of them."""
    folder = tmp_path_factory.mktemp("bf16")
    source = ("--model", work / "model", "--data", work / "data")
    run_steps(
        ("encode", *source, "--output", folder / "vectors", "--dtype", "bf16"),
        ("index", "--vectors", folder / "vectors", "--output", folder / "index"),
    )
    return folder


@pytest.mark.parametrize(
    "request_type",
    [EncodeRequest, SearchCommandRequest, EvaluateRequest, ServeRequest, MineRequest, ScoreRequest],
)
def test_every_command_that_encodes_has_the_option(request_type: type[Any]) -> None:
    assert issubclass(request_type, DtypeOptions)


@pytest.mark.parametrize("command", ["encode", "search", "evaluate", "serve", "mine", "score"])
def test_an_unknown_dtype_is_refused_before_any_work(call: Call, command: str) -> None:
    required_options = {
        "encode": ("--model", "m", "--data", "d", "--output", "o"),
        "evaluate": ("--data", "d", "--model", "m"),
        "serve": ("--model", "m"),
        "mine": ("--data", "d", "--model", "m", "--output", "o.parquet"),
        "score": ("mined", "--data", "d", "--teacher", "m", "--output", "o.parquet"),
    }
    outcome = call(command, *required_options.get(command, ()), "--dtype", "float16")
    fails(outcome, 2, "--dtype: expected one of auto, fp32, bf16, fp16, got 'float16'.")


@needs_cpu
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_encode_prints_and_records_the_dtype(
    call: Call,
    work: Path,
    tmp_path: Path,
    dtype: str,
) -> None:
    model = work / "model"
    encode = ("encode", "--model", model, "--data", work / "data", "--output", tmp_path / "out")
    outcome = done(call(*encode, "--dtype", dtype, "--json"))
    assert outcome.err == f"{model} computes in {dtype} on cpu (as requested)\n"
    assert json.loads(outcome.out)["precision"] == dtype
    assert read_manifest(tmp_path / "out").precision == dtype


@needs_cpu
def test_the_default_on_a_cpu_is_fp32_even_if_it_has_bf16_instructions(
    call: Call,
    work: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("tilefold.recipes.loading.supports_bf16", lambda: True)
    model = work / "model"
    encode = ("encode", "--model", model, "--data", work / "data", "--output", tmp_path / "out")
    outcome = done(call(*encode, "--json"))
    assert outcome.err == f"{model} computes in fp32 on cpu (the default on CPUs)\n"
    assert json.loads(outcome.out)["precision"] == "fp32"


def test_encode_does_not_resume_or_keep_vectors_in_another_dtype(
    call: Call,
    work: Path,
    in_bf16: Path,
) -> None:
    source = ("--model", work / "model", "--data", work / "data")
    again = ("encode", *source, "--output", in_bf16 / "vectors", "--dtype")
    outcome = call(*again, "fp32")
    fails(outcome, 1, "computed in bf16, but here the model computes in fp32", "--dtype bf16")
    assert "has nothing left to do" in done(call(*again, "bf16")).err


@needs_cpu
def test_encode_in_fp8_is_recorded_not_mixed_and_searched_without_a_warning(
    call: Call,
    work: Path,
    tmp_path: Path,
) -> None:
    model = work / "model"
    source = ("--model", model, "--data", work / "data", "--output", tmp_path / "out")
    outcome = done(call("encode", *source, "--fp8", "--json"))
    assert outcome.err == f"{model} computes in fp8 on cpu (accelerate(model, fp8=True))\n"
    assert json.loads(outcome.out)["precision"] == "fp8"
    assert "has nothing left to do" in done(call("encode", *source, "--fp8")).err
    outcome = call("encode", *source, "--dtype", "fp32")
    fails(outcome, 1, "computed in fp8, but here the model computes in fp32", "with --fp8")
    done(call("index", "--vectors", tmp_path / "out", "--output", tmp_path / "index"))
    outcome = done(call("search", "csv", "--model", model, "--index", tmp_path / "index", "--json"))
    assert json.loads(outcome.out)["precision"] == {"index": "fp8", "queries": "fp32"}
    assert outcome.notes == []


def test_a_dry_run_names_the_dtype(call: Call, work: Path, tmp_path: Path) -> None:
    source = ("--model", work / "model", "--data", work / "data")
    estimate = ("encode", *source, "--output", tmp_path / "out", "--dry-run", "--dtype", "bf16")
    outcome = done(call(*estimate, "--json"))
    assert "computes in bf16" in outcome.err
    assert json.loads(outcome.out)["precision"] == "bf16"


def test_a_search_in_another_dtype_than_the_index_is_reported(
    call: Call,
    work: Path,
    in_bf16: Path,
) -> None:
    model = work / "model"
    search = ("search", "csv files", "--model", model, "--index", in_bf16 / "index", "--json")
    outcome = done(call(*search, "--dtype", "bf16"))
    assert json.loads(outcome.out)["precision"] == {"index": "bf16", "queries": "bf16"}
    assert outcome.notes == []
    outcome = done(call(*search, "--dtype", "fp32"))
    assert json.loads(outcome.out)["precision"] == {"index": "bf16", "queries": "fp32"}
    computes, warning = outcome.err.splitlines()
    assert computes.startswith(f"{model} computes in fp32 on ")
    assert warning.startswith(
        "the index was computed in bf16, and queries are encoded in fp32: scores differ",
    )
    assert "--dtype bf16" in warning


def test_an_index_without_a_recorded_dtype_is_searched_without_a_warning(
    call: Call,
    work: Path,
    in_bf16: Path,
    tmp_path: Path,
) -> None:
    index = tmp_path / "index"
    done(call("index", "--vectors", in_bf16 / "vectors", "--output", index))
    manifest = json.loads((index / "index.json").read_text())
    del manifest["precision"], manifest["checksum"]
    (index / "index.json").write_text(json.dumps(manifest))
    search = ("search", "csv files", "--model", work / "model", "--index", index, "--json")
    outcome = done(call(*search, "--dtype", "fp32"))
    assert json.loads(outcome.out)["precision"] == {"index": None, "queries": "fp32"}
    assert outcome.notes == []


def test_searches_of_several_queries_have_the_dtypes_in_each_record(
    call: Call,
    work: Path,
    in_bf16: Path,
    tmp_path: Path,
) -> None:
    queries = tmp_path / "queries.tsv"
    queries.write_text("a\tcsv files\nb\tjson\n")
    index = ("--model", work / "model", "--index", in_bf16 / "index", "--dtype", "bf16")
    search = ("search", "--queries", queries, *index, "--json")
    records = [json.loads(line) for line in done(call(*search)).out.splitlines()]
    assert [record["precision"] for record in records] == [
        {"index": "bf16", "queries": "bf16"},
        {"index": "bf16", "queries": "bf16"},
    ]
    saved = measured(call(*search, "--save-run", tmp_path / "run.trec"))
    assert saved["precision"] == {"index": "bf16", "queries": "bf16"}


def test_evaluate_takes_the_dtype_and_reports_another_one(
    call: Call,
    work: Path,
    in_bf16: Path,
) -> None:
    index = ("--model", work / "model", "--index", in_bf16 / "index")
    evaluate = ("evaluate", "--data", work / "data", *index, "--json", "--dtype")
    outcome = done(call(*evaluate, "fp32"))
    assert json.loads(outcome.out)["precision"] == {"index": "bf16", "queries": "fp32"}
    assert [line for line in outcome.notes if "was computed in bf16" in line] == outcome.notes
    assert len(outcome.notes) == 1


def test_a_reranker_computes_in_the_dtype(call: Call, shared: Path) -> None:
    rerank = ("--rerank", shared / "late", "--dtype", "bf16")
    source = ("--index", shared / "bm25", "--data", shared / "data")
    result = measured(call("search", "csv files", *source, *rerank, "--json"))
    assert result["precision"] == {"rerank_documents": "bf16", "rerank_queries": "bf16"}


def test_mined_and_scored_rows_record_the_dtype(
    call: Call,
    shared: Path,
    masked_lm: str,
    tmp_path: Path,
) -> None:
    data = ("--data", shared / "data", "--dtype", "bf16")
    index = ("--index", shared / "index", "--model", masked_lm)
    mined = measured(call("mine", *data, *index, "--output", tmp_path / "m.parquet", "--json"))
    assert mined["precision"] is not None
    score = ("score", tmp_path / "m.parquet", *data, "--teacher", masked_lm)
    scored = measured(call(*score, "--output", tmp_path / "s.parquet", "--json"))
    assert set(scored["precision"].values()) == {"bf16"}
    (teacher,) = read_training_rows(tmp_path / "s.parquet").made_by["teachers"].values()
    assert teacher["precision"] == "bf16"


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_a_server_computes_in_the_dtype_and_shows_that_of_its_index(
    work: Path,
    in_bf16: Path,
    capsys: pytest.CaptureFixture[str],
    dtype: Any,
) -> None:
    request = ServeRequest(
        model=str(work / "model"),
        index=in_bf16 / "index",
        dtype=dtype,
        default_side="query",
    )
    service = _load(request, request.limits())
    assert inference_precision(service.first_model.model) == dtype
    with serving(service) as client:
        info = client.get("/info").json
    assert info["precision"] == {"sparse": dtype}
    assert info["search_precision"] == {"index": "bf16", "queries": dtype}
    error = capsys.readouterr().err
    assert f"computes in {dtype} on " in error
    assert ("the index was computed in bf16" in error) == (dtype == "fp32")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        pytest.param(
            ("search", "csv", "--index", "bm25"),
            "--dtype has no effect: {folder}/bm25 is a BM25 index, which needs no model",
            id="search in a BM25 index",
        ),
        pytest.param(
            ("evaluate", "--data", "data", "--run", "bm25.trec"),
            "--dtype requires a model: --run is only scored",
            id="evaluation of a run",
        ),
        pytest.param(
            ("mine", "--data", "data", "--run", "bm25.trec", "--output", "m.parquet"),
            "--dtype cannot be used with --run, because a run needs no model",
            id="mining of a run",
        ),
        pytest.param(
            (
                "score",
                "mined.parquet",
                "--data",
                "data",
                "--teacher",
                "bm25",
                "--output",
                "s.parquet",
            ),
            "--dtype has no effect if all teachers are BM25: leave it out",
            id="scores of BM25",
        ),
        pytest.param(
            ("serve", "--index", "bm25"),
            "--dtype has no effect without a model: leave it out",
            id="server of a BM25 index",
        ),
    ],
)
def test_a_dtype_without_a_model_is_refused(
    call: Call,
    shared: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: tuple[str, ...],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    inputs = ("bm25", "data", "bm25.trec", "mined.parquet")
    command = [
        shared / word if word in inputs and option != "--teacher" else word
        for option, word in zip(("", *arguments), arguments, strict=False)
    ]
    fails(call(*command, "--dtype", "bf16"), 2, message.format(folder=shared))


@needs_cpu
def test_info_shows_the_default_dtype_of_each_device(call: Call) -> None:
    assert measured(call("info", "--json"))["precision"] == {
        "cpu": {"auto": "fp32", "reason": "the default on CPUs"},
    }
    line = "--dtype auto: models compute in fp32 on cpu (the default on CPUs)"
    assert line in done(call("info")).out
