from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.refusals import refused
from tilefold.retrieval import SparseVectors, write_vectors
from tilefold.retrieval.common.provenance import Provenance
from tilefold.retrieval.errors import DataError, VocabularyMismatchError
from tilefold.retrieval.vectors.export import export_opensearch, export_vespa

Make = Callable[..., SparseVectors]
WEIGHT = st.floats(0, 1e6, width=32, allow_subnormal=False)
EXPORTERS = [export_opensearch, export_vespa]


def read_back(folder: Path) -> dict[str, dict[str, float]]:
    """Id -> name -> weight, as the engine reads the files."""
    record = json.loads((folder / "export.json").read_text())
    results: dict[str, dict[str, float]] = {}
    field = record["settings"]["field"]
    for name in record["files"]:
        if name.endswith((".sd", "mapping.json")):
            continue
        lines = [json.loads(line) for line in (folder / name).read_bytes().splitlines()]
        if record["engine"] == "opensearch":
            for action, source in zip(lines[::2], lines[1::2], strict=True):
                assert source["id"] == action["index"]["_id"] and set(action) == {"index"}
                results[source["id"]] = source[field]
        else:
            for put in lines:
                document, namespace = (
                    record["settings"]["document"],
                    record["settings"]["namespace"],
                )
                assert put["put"] == f"id:{namespace}:{document}::{put['fields']['id']}"
                results[put["fields"]["id"]] = put["fields"][field]["cells"]
    return results


def expected(
    vectors: SparseVectors,
    tokens: list[str] | None = None,
) -> dict[str, dict[str, float]]:
    rows = {}
    for i, name in enumerate(vectors.ids):
        terms, weights = vectors.row(i)
        pairs = [(t, w) for t, w in zip(terms.tolist(), weights, strict=True) if w > 0]
        rows[name] = {str(t) if tokens is None else tokens[t]: w for t, w in pairs}
    return rows


def same(found: dict[str, dict[str, float]], wanted: dict[str, dict[str, float]]) -> bool:
    as_float32 = {
        name: {term: np.float32(w) for term, w in row.items()} for name, row in found.items()
    }
    return as_float32 == wanted


@pytest.mark.parametrize("export", EXPORTERS)
@settings(max_examples=20, deadline=None)
@given(weights=st.lists(st.lists(WEIGHT, min_size=5, max_size=5), min_size=1, max_size=6))
def test_files_hold_every_bit_of_weights(
    export: Any,
    weights: list[list[float]],
    tmp_path_factory: Any,
) -> None:
    folder = tmp_path_factory.mktemp("export") / "files"
    vectors = SparseVectors.from_rows(
        {f"d{i}": dict(enumerate(row)) for i, row in enumerate(weights)},
        5,
    )
    tokens = ["##s", 'a"\\', "\u2028", "cells", "Ä"]
    exported = export(vectors, folder, tokens)
    assert same(read_back(folder), expected(vectors, tokens))
    assert (exported.n_documents, exported.n_weights) == (
        len(weights),
        sum(w > 0 for row in weights for w in row),
    )


@pytest.mark.parametrize("export", EXPORTERS)
def test_shards_give_the_files_of_the_vectors_in_memory(
    export: Any,
    make_vectors: Make,
    tmp_path: Path,
) -> None:
    vectors = make_vectors(50)
    vectors.provenance = Provenance("m" * 64, "t" * 64)
    write_vectors(vectors, tmp_path / "vectors", shard_size=7)
    export(vectors, tmp_path / "memory")
    exported = export(tmp_path / "vectors", tmp_path / "shards")
    for name in exported.files:
        assert (tmp_path / "memory" / name).read_bytes() == (
            tmp_path / "shards" / name
        ).read_bytes()
    assert same(read_back(tmp_path / "shards"), expected(vectors))
    record = json.loads((tmp_path / "shards" / "export.json").read_text())
    assert [record[name] for name in ("fingerprint", "model_fingerprint", "texts_sha256")] == [
        c * 64 for c in "fmt"
    ]
    assert record["names"] == "numbers"


@pytest.mark.parametrize("export", EXPORTERS)
def test_terms_that_would_become_one_are_refused(export: Any, tmp_path: Path) -> None:
    vectors = SparseVectors.from_rows({"a": {0: 1.0, 2: 1.0}}, 4)
    twice = r"distinct names of terms, got 'x' \(terms 0 and 3\) twice\. .* --names numbers\.$"
    for tokens, kind, message in (
        (["x", "y", "z", "x"], DataError, twice),  # a query with term 3 would find term 0
        (
            ["x", "y", "", "z"],
            DataError,
            r"not accept a term whose name is empty, got '' \(term 2\).*Name terms by their numbers",
        ),
        (["\ud800", "y", "z", "u"], DataError, r"half a surrogate pair, got '\\ud800' \(term 0\)"),
        (["x", "y"], VocabularyMismatchError, "one for each of the 4 terms of the vectors, got 2"),
    ):
        refused(kind, message, export, vectors, tmp_path / "out", tokens)
    assert not (tmp_path / "out").exists()
    export(vectors, tmp_path / "out", ["x", "y", "z", "y"])  # no document has either y


@pytest.mark.parametrize("export", EXPORTERS)
def test_an_earlier_export_is_replaced_and_no_other_file(
    export: Any,
    make_vectors: Make,
    tmp_path: Path,
) -> None:
    export(make_vectors(5), tmp_path / "out")
    refused(FileExistsError, "overwrite=True", export, make_vectors(3), tmp_path / "out")
    assert len(read_back(tmp_path / "out")) == 5
    export(make_vectors(3), tmp_path / "out", overwrite=True)
    assert len(read_back(tmp_path / "out")) == 3
    (tmp_path / "out" / "thesis.txt").write_text("years of work")
    refused(
        FileExistsError,
        "nothing was overwritten",
        export,
        make_vectors(5),
        tmp_path / "out",
        overwrite=True,
    )
    none, folder = SparseVectors.from_rows({}, 5), tmp_path / "queries"
    refused(
        DataError,
        "vectors: expected at least one document, got 0 rows",
        export,
        none,
        tmp_path / "new",
    )
    write_vectors(make_vectors(3), folder, kind="query")
    refused(
        DataError,
        "of documents, got vectors of kind 'query'",
        export,
        folder,
        tmp_path / "new",
    )


@pytest.mark.parametrize("export", EXPORTERS)
def test_texts_go_along(export: Any, make_vectors: Make, tmp_path: Path) -> None:
    vectors = make_vectors(2)
    export(vectors, tmp_path / "out", texts={"d0": "Bäume \u2028 wachsen", "d1": ""})
    assert (
        "Bäume \u2028 wachsen"
        in b"".join(f.read_bytes() for f in (tmp_path / "out").iterdir()).decode()
    )
    for texts, message in (
        ({"d0": ""}, "texts: expected one per document, got no text for 'd1'"),
        ({"d0": "\ud800", "d1": ""}, "half a surrogate pair in the text of 'd0'"),
    ):
        refused(DataError, message, export, vectors, tmp_path / "other", texts=texts)
    assert not (tmp_path / "other").exists()


ROWS = SparseVectors.from_rows
ONE = ROWS({"a": {0: 1.0}}, 2)
MODULO = {"field_type": "sparse_vector"}


@pytest.mark.parametrize(
    ("export", "vectors", "options", "message"),
    [
        (
            export_opensearch,
            ONE,
            {"tokens": ["3.5", "."]},
            r"a dot, got '3.5' \(term 0\). .*--names numbers \(for neural_sparse on OpenSearch dots=",
        ),
        (
            export_opensearch,
            ROWS({"a": {0: 1e-40}}, 2),
            {},
            r"weights of at least 1.18e-38 .*, got 1e-40",
        ),
        (
            export_opensearch,
            ROWS({"ä" * 300: {0: 1.0}}, 2),
            {},
            "not accept ids with more than 512 bytes",
        ),
        (export_opensearch, ONE, {"tokens": ["x" * 40_000, "y"]}, "more than 32766 bytes"),
        (
            export_opensearch,
            ROWS({"a": {1: 1.0}}, 50_368),
            MODULO,
            r"modulo 32,768.* of 50,368. Use .*'rank_features'",
        ),
        (
            export_vespa,
            ONE,
            {"tokens": ["x\0", "y"]},
            r"the control character '\\x00', got 'x\\x00' \(term 0\)",
        ),
        (
            export_vespa,
            ROWS({"a\x1b": {0: 1.0}}, 2),
            {},
            r"not accept ids with the control character '\\x1b'",
        ),
        (
            export_vespa,
            ONE,
            {"texts": {"a": "ding\a"}},
            r"not accept texts with the control character '\\x07', got one for 'a'",
        ),
    ],
)
def test_what_no_engine_keeps_is_refused(
    export: Any,
    vectors: Any,
    options: Any,
    message: str,
    tmp_path: Path,
) -> None:
    refused(DataError, message, export, vectors, tmp_path / "out", **options)
    assert not list(tmp_path.iterdir())


def test_wrong_options_are_named_and_a_dot_is_kept_on_request_or_where_it_is_not_used(
    tmp_path: Path,
) -> None:
    for wrong in (
        {"field": "a.b"},
        {"field": "text"},
        {"dots": "_"},
        {"field_type": "knn"},
        {"part_bytes": 0},
    ):
        refused(
            ValueError,
            f"{next(iter(wrong))}: expected",
            export_opensearch,
            ONE,
            tmp_path / "out",
            **wrong,
        )
    for wrong in ({"document": "my-doc"}, {"namespace": "a:b"}, {"field": "id"}, {"field": "9"}):
        refused(
            ValueError,
            f"{next(iter(wrong))}: expected",
            export_vespa,
            ONE,
            tmp_path / "out",
            **wrong,
        )
    message, kind = "must be left out with field_type='sparse_vector'", "sparse_vector"
    refused(
        ValueError, message, export_opensearch, ONE, tmp_path / "out", ["a", "b"], field_type=kind
    )
    export_opensearch(ONE, tmp_path / "out", ["3.5", "."], dots="keep")
    assert read_back(tmp_path / "out") == {"a": {"3.5": 1.0}}
    export_opensearch(ONE, tmp_path / "out", ["three", "."], overwrite=True)


def test_opensearch_files_are_no_longer_than_asked_and_begin_with_an_action(
    make_vectors: Make,
    tmp_path: Path,
) -> None:
    vectors = make_vectors(40)
    exported = export_opensearch(vectors, tmp_path / "out", part_bytes=2500)
    parts = [tmp_path / "out" / name for name in exported.files[1:]]
    assert len(parts) > 5 and all(part.stat().st_size <= 2500 for part in parts)
    assert all(
        part.read_bytes().startswith(b'{"index":') and part.read_bytes().endswith(b"}\n")
        for part in parts
    )
    assert list(read_back(tmp_path / "out")) == vectors.ids
    assert len(export_opensearch(vectors, tmp_path / "tiny", part_bytes=1).files) == 41


def test_the_ceiling_of_sparse_vector_cuts_nothing_off_and_is_above_0_without_a_weight(
    tmp_path: Path,
) -> None:
    for weights, ceiling in (({30_521: 4.321}, 4.33), ({}, 1.0)):
        export_opensearch(
            ROWS({"a": weights}, 30_522),
            tmp_path / "out",
            field_type="sparse_vector",
            overwrite=True,
        )
        mapping = json.loads((tmp_path / "out" / "mapping.json").read_text())
        assert mapping["settings"] == {"index": {"sparse": True}}
        method = mapping["mappings"]["properties"]["sparse"]["method"]
        assert method == {"name": "seismic", "parameters": {"quantization_ceiling_ingest": ceiling}}


def test_the_mapping_says_what_made_the_vectors(make_vectors: Make, tmp_path: Path) -> None:
    export_opensearch(
        make_vectors(3),
        tmp_path / "out",
        field="splade",
        texts={f"d{i}": "x" for i in range(3)},
    )
    mappings = json.loads((tmp_path / "out" / "mapping.json").read_text())["mappings"]
    kinds = {
        "id": {"type": "keyword"},
        "splade": {"type": "rank_features"},
        "text": {"type": "text"},
    }
    assert (
        mappings["properties"] == kinds and mappings["_meta"]["tilefold"]["fingerprint"] == "f" * 64
    )


def test_vespa_keeps_tokens_that_are_words_of_its_format(tmp_path: Path) -> None:
    vectors = SparseVectors.from_rows({"a": {0: 1.0, 1: 2.0, 2: 0.5, 3: 0.25}, "empty": {}}, 4)
    export_vespa(
        vectors,
        tmp_path / "out",
        ["cells", "values", "type", "a.b"],
        document="article",
        field="splade",
    )
    assert read_back(tmp_path / "out") == {
        "a": {"cells": 1.0, "values": 2.0, "type": 0.5, "a.b": 0.25},
        "empty": {},
    }
    schema = (tmp_path / "out" / "article.sd").read_text()
    assert "schema article {" in schema and "field splade type tensor<float>(token{}) {" in schema
    assert "expression: sum(query(q) * attribute(splade))" in schema and "field text" not in schema
    assert schema.count("{") == schema.count("}")
