"""The maximal length of texts is an option of one encoding, and does not change the model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.retrieval.long_documents import CONTENTS
from tilefold import retrieval as r
from tilefold.integrations.sentence_transformers import accelerate, restore
from tilefold.retrieval.common.provenance import model_fingerprint


@pytest.fixture(params=["plain", "accelerated"])
def model(request: pytest.FixtureRequest, splade: Any) -> Iterator[Any]:
    """The SPLADE model, as it is and accelerated."""
    if request.param == "plain":
        yield splade
        return
    accelerate(splade)
    yield splade
    restore(splade)


@pytest.mark.parametrize("kind", ["document", "query"])
def test_max_length_truncates_and_is_recorded(model: Any, kind: Any, tmp_path: Path) -> None:
    fingerprint = model_fingerprint(model)
    complete = r.encode_collection(model, CONTENTS, tmp_path / "complete")
    truncated = r.encode_collection(
        model,
        CONTENTS,
        tmp_path / "truncated",
        max_length=9,
        kind=kind,
    )
    assert truncated.truncated == {"count": 4, "max_length": 9}
    assert truncated.settings["max_length"] == 9
    assert "max_length" not in complete.settings
    assert truncated.provenance == complete.provenance
    assert model_fingerprint(model) == fingerprint


def test_the_limit_of_the_model_applies_again_after_an_encoding_with_max_length(
    model: Any,
    tmp_path: Path,
) -> None:
    before = r.encode_collection(model, CONTENTS, tmp_path / "before")
    r.encode_collection(model, CONTENTS, tmp_path / "truncated", max_length=9)
    after = r.encode_collection(model, CONTENTS, tmp_path / "after")
    assert after.shards == before.shards
    assert after.truncated == before.truncated


def test_max_length_encodes_as_a_model_with_that_limit(
    model: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    r.encode_collection(model, CONTENTS, tmp_path / "by option", max_length=9)
    with monkeypatch.context() as patch:
        patch.setattr(model, "max_seq_length", 9)
        r.encode_collection(model, CONTENTS, tmp_path / "by model")

    by_option = r.read_vectors(tmp_path / "by option")
    by_model = r.read_vectors(tmp_path / "by model")
    assert np.array_equal(by_model.indices, by_option.indices)
    assert np.allclose(by_model.data, by_option.data, rtol=1e-5)


def test_max_length_limits_token_vectors(late: Any, tmp_path: Path) -> None:
    truncated = r.encode_tokens(late, CONTENTS, tmp_path / "truncated", max_length=8)
    complete = r.encode_tokens(late, CONTENTS, tmp_path / "complete")
    assert truncated.n_tokens <= 8 * len(CONTENTS)
    assert truncated.n_tokens < complete.n_tokens


def test_a_searcher_takes_truncated_token_vectors(late: Any, tmp_path: Path) -> None:
    r.encode_tokens(late, CONTENTS, tmp_path, max_length=8)
    assert r.Searcher(r.BM25Index.build(CONTENTS), late=late, tokens=r.open_tokens(tmp_path))


def test_a_max_length_above_that_of_the_model_is_refused(splade: Any, tmp_path: Path) -> None:
    message = f"max_length: expected at most {splade.max_seq_length}, .* got 4096"
    with pytest.raises(ValueError, match=message):
        r.encode_collection(splade, CONTENTS, tmp_path / "vectors", max_length=4096)
