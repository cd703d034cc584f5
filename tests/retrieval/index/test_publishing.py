"""The record of the last addition of logged documents, when other processes change the index."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from tests.cli.program import run_cli
from tilefold import retrieval as r
from tilefold.retrieval.errors import DataError
from tilefold.retrieval.index.generations import read_generation
from tilefold.retrieval.index.publishing import Publication, documents_folder

DIMENSION = 4
SEQUENCE = 3  # of the last change of a log


def token_vectors(*ids: str) -> r.TokenVectors:
    """One token vector for each document."""
    rows = [torch.ones(1, DIMENSION) for _ in ids]
    return r.TokenVectors.pack(list(ids), rows, DIMENSION, "fp16")


@pytest.fixture
def index(tmp_path: Path) -> Path:
    """A late index of a segment. A process was killed before it had added another one."""
    index = tmp_path / "index"
    r.LateIndex.build(token_vectors("a"), index)
    r.update_index(index, token_vectors("b"))
    Publication(SEQUENCE, read_generation(index).id).write(index)
    return index


def was_added(index: Path) -> bool | None:
    """Return whether the index has the changes of the killed process."""
    publication = Publication.read(index)
    assert publication is not None
    assert publication.sequence == SEQUENCE
    return publication.succeeded


def test_a_merge_of_token_vectors_does_not_add_what_a_killed_process_has_not(index: Path) -> None:
    r.merge_segments(index)

    assert was_added(index) is False


@pytest.mark.parametrize("state", ["intact", "damaged", "missing"])
def test_an_index_that_is_built_again_does_not_have_what_a_killed_process_has_not_added(
    index: Path,
    tmp_path: Path,
    state: str,
) -> None:
    vectors = tmp_path / "vectors"
    writer = r.TokenVectorWriter(vectors, r.TokenManifest(DIMENSION, "fp16"))
    writer.write_shard(0, token_vectors("a"))
    writer.finish()
    if state == "damaged":
        (index / "index.json").write_text("{")
    if state == "missing":
        shutil.rmtree(index)

    options = ("--backend", "late", "--tokens", vectors, "--output", index, "--overwrite")
    assert run_cli("index", *options) == 0

    assert was_added(index) is False
    assert list(r.LateIndex.load(index).ids) == ["a"]


def test_a_damaged_record_is_named_with_a_remedy(index: Path) -> None:
    (documents_folder(index) / "published.json").write_text('{"sequence": 3}')

    with pytest.raises(DataError, match=r"published\.json: expected the last addition .* Remove"):
        Publication.read(index)
