"""`tilefold search` over page images: explanations, and the images of --heat-maps."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.cli.program import Call, done, fails, measured
from tests.serve.page_service import make_page_parts
from tilefold.cli.search import _HeatMapPaths
from tilefold.retrieval import load_collection

QUERY = "some words"


@pytest.fixture(scope="module")
def options(tmp_path_factory: pytest.TempPathFactory) -> tuple[str | Path, ...]:
    """Options that name an index of page images, its model and its pages."""
    folder = tmp_path_factory.mktemp("page-search")
    make_page_parts(folder)
    return (
        *("--index", folder / "index"),
        *("--model", folder / "model"),
        *("--data", folder / "pages"),
    )


def test_heat_maps_of_the_hits_are_written(
    call: Call,
    options: tuple[str | Path, ...],
    tmp_path: Path,
) -> None:
    maps = tmp_path / "maps"
    arguments = ("search", QUERY, *options, "--k", "3", "--explain", "--heat-maps", maps)
    hits = measured(call(*arguments, "--json"))["hits"]
    documents = load_collection(options[-1]).documents
    assert len(hits) == 3
    for hit in hits:
        image = Image.open(hit["heat_map"])
        page = documents[hit["id"]].page
        assert page is not None
        plain = page.image()
        assert image.size == plain.size
        assert np.abs(np.asarray(image, float) - np.asarray(plain, float)).mean() > 10
        boxes = [match["box"] for match in hit["matches"] if "box" in match]
        assert all(0 <= left < right <= 1 for left, _, right, _ in boxes)
    assert len(list(maps.iterdir())) == 3
    fails(call(*arguments), 1, "expected a new or empty folder")
    names = {Path(hit["heat_map"]).name for hit in hits}
    assert names == {f"rank-{hit['rank']}-{file_stem(hit['id'])}.png" for hit in hits}
    table = done(call(*arguments, "--overwrite"))
    assert "heat map" in table.out


def file_stem(page_id: str) -> str:
    """Name of a page in the name of a file."""
    return page_id.removesuffix(".png").removesuffix(".webp").replace("#", "_")


def test_explanations_mark_matches_in_the_prompt(
    call: Call,
    options: tuple[str | Path, ...],
) -> None:
    arguments = ("search", QUERY, *options, "--k", "7", "--explain")
    hits = measured(call(*arguments, "--json"))["hits"]
    matches = [match for hit in hits for match in hit["matches"]]
    assert all(("box" in match) != match.get("prompt", False) for match in matches)
    has_prompt_matches = any(match.get("prompt") and match["content"] for match in matches)
    assert ("(prompt)" in done(call(*arguments)).out) == has_prompt_matches


def test_heat_maps_of_several_queries_are_named_by_query_and_rank(
    call: Call,
    options: tuple[str | Path, ...],
    tmp_path: Path,
) -> None:
    queries = tmp_path / "queries.tsv"
    queries.write_text(f"q1\t{QUERY}\nq2\tothers\n", encoding="utf-8")
    maps = ("--heat-maps", tmp_path / "maps")
    done(call("search", "--queries", queries, *options, "--k", "1", *maps))
    names = sorted(file.name for file in (tmp_path / "maps").iterdir())
    assert [name[:16] for name in names] == ["query-q1-rank-1-", "query-q2-rank-1-"]


def test_a_query_id_with_bytes_that_are_not_utf_8_has_a_heat_map(tmp_path: Path) -> None:
    """Standard input has such bytes as surrogates, where the locale is C."""
    paths = _HeatMapPaths(tmp_path)
    first = paths.path_of(query_id="a\udcfe", rank=1, n_hits=1, page_id="p.png")
    second = paths.path_of(query_id="a\udcff", rank=1, n_hits=1, page_id="p.png")
    first.touch()
    assert first.name.startswith("query-a_-")
    assert first != second


def test_queries_whose_ids_become_the_same_name_have_heat_maps_of_their_own(
    call: Call,
    options: tuple[str | Path, ...],
    tmp_path: Path,
) -> None:
    long_id = "long" * 60
    ids = ["a/b", "a_b", "A_b", "a:b", f"{long_id}1", f"{long_id}2"]
    queries = tmp_path / "queries.tsv"
    queries.write_text("".join(f"{query_id}\t{QUERY}\n" for query_id in ids), encoding="utf-8")
    maps = tmp_path / "maps"

    search = ("search", "--queries", queries, *options, "--k", "2", "--heat-maps", maps, "--json")
    records = [json.loads(line) for line in done(call(*search)).out.splitlines()]

    hits = [hit for record in records for hit in record["hits"]]
    paths = [Path(hit["heat_map"]) for hit in hits]
    assert [record["id"] for record in records] == ids
    assert len({path.name.lower() for path in paths}) == 2 * len(ids)
    assert sorted(paths) == sorted(maps.iterdir())
    assert paths[2].name.startswith("query-a_b-rank-1-")


def test_heat_maps_need_pages(
    call: Call,
    options: tuple[str | Path, ...],
    tmp_path: Path,
) -> None:
    without_data = options[:-2]
    maps = ("--heat-maps", tmp_path / "maps")
    fails(call("search", QUERY, *without_data, *maps), 2, "--heat-maps requires --data")
    (tmp_path / "maps").write_text("a file")
    fails(call("search", QUERY, *options, *maps), 1, "expected a folder, got the file")
