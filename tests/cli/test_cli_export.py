from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.cli.program import run_cli
from tests.recipes.small import small_collection
from tilefold.retrieval import SparseVectors, read_vectors, write_vectors


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory, masked_lm: str) -> Path:
    folder = tmp_path_factory.mktemp("export")
    small_collection().save_beir(folder / "data")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_WAIT_POLICY", "PASSIVE")
        patch.setenv("TOKENIZERS_PARALLELISM", "false")
        encode = ("encode", "--model", masked_lm, "--data", folder / "data", "--top-k", "16")
        assert run_cli(*encode, "--output", folder / "vectors") == 0
    return folder


def test_encoded_documents_are_exported_with_tokens_and_texts(
    call: Any, work: Path, masked_lm: str, tmp_path: Path
) -> None:
    places = ("--vectors", work / "vectors", "--model", masked_lm, "--data", work / "data")
    done = call("export", "--to", "vespa", *places, "--output", tmp_path / "vespa", "--document", "article", "--json")
    assert done.code == 0, done.err
    vectors = read_vectors(work / "vectors")
    report = json.loads(done.out)
    assert (report["n_documents"], report["n_weights"]) == (len(vectors), len(vectors.data))
    assert report["files"] == ["article.sd", "feed.jsonl"]
    puts = [json.loads(line) for line in (tmp_path / "vespa" / "feed.jsonl").read_bytes().splitlines()]
    assert [put["put"] for put in puts] == [f"id:tilefold:article::{name}" for name in vectors.ids]
    assert puts[0]["fields"]["text"] == small_collection().contents()[vectors.ids[0]]
    done = call("export", "--to", "opensearch", *places, "--output", tmp_path / "bulk", "--dots", "keep")
    assert done.code == 0 and f"{len(vectors)} documents written for opensearch" in done.out
    source = json.loads((tmp_path / "bulk" / "bulk-00000.ndjson").read_bytes().splitlines()[1])
    assert {"id": vectors.ids[0], "sparse": puts[0]["fields"]["sparse"]["cells"]}.items() <= source.items()


def test_export_refuses_what_does_not_belong_together(call: Any, work: Path, masked_lm: str, tmp_path: Path) -> None:
    here = ("--vectors", work / "vectors", "--output", tmp_path / "out")
    wrong = {
        ("--to", "lucene"): "--to: expected one of opensearch, vespa, got 'lucene'",
        ("--to", "vespa"): "--model: give the model that made the vectors, or --names numbers",
        ("--to", "vespa", "--dots", "keep"): "--dots goes with --to opensearch",
        ("--to", "vespa", "--names", "words"): "--names: expected one of tokens, numbers, got 'words'",
        ("--to", "vespa", "--names", "numbers", "--field", "a.b"): "--field: expected letters",
        ("--to", "opensearch", "--names", "tokens", "--field-type", "sparse_vector"): "sparse_vector are numbers",
        ("--to", "opensearch", "--model", masked_lm, "--dots", "x"): "--dots: expected one of refuse, keep, got 'x'",
        ("--to", "opensearch", "--names", "numbers", "--dots", "keep"): "--dots does nothing where terms are called",
    }
    for options, message in wrong.items():
        refused = call("export", *options, *here)
        assert (refused.code, message in refused.err) == (2, True), refused.err
    other: Any = small_collection()
    other.documents.popitem()
    other.save_beir(tmp_path / "other")
    refused = call("export", "--to", "vespa", "--names", "numbers", *here, "--data", tmp_path / "other")
    assert (refused.code, "holds other texts than those" in refused.err) == (1, True)
    write_vectors(SparseVectors.from_rows({"a": {1012: 1.0}}, 30522), tmp_path / "dotted")
    out = ("--output", tmp_path / "out")
    refused = call("export", "--to", "opensearch", "--vectors", tmp_path / "dotted", *out, "--model", "minilm")
    assert refused.code == 1
    assert "holds a dot, got '.' (term 1012). Give --names numbers (or --dots keep" in refused.err
    write_vectors(SparseVectors.from_rows({"a": {7: 1.0}}, 30522, "0" * 64), tmp_path / "foreign")
    refused = call("export", "--to", "vespa", "--vectors", tmp_path / "foreign", *out, "--model", masked_lm)
    assert (refused.code, "(fingerprint 000000000000), got that of" in refused.err) == (1, True)
    assert not (tmp_path / "out").exists()
    done = call("export", "--to", "opensearch", "--field-type", "sparse_vector", *here)
    assert done.code == 0, done.err
