"""Heat maps point at the patch that matches, on the grids of three architectures."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from PIL import Image, ImageChops, ImageColor

from tests.retrieval.search import page_processors
from tests.retrieval.search.page_processors import (
    PATCH_PIXELS,
    TILE_SIDE,
    page_model,
    patch_brightness,
)
from tilefold.retrieval.encoding.scored_tokens import scored_tokens
from tilefold.retrieval.errors import DataError
from tilefold.retrieval.search.heat_maps import Box, PatchGrid, draw_heat_map, patch_grid
from tilefold.retrieval.search.token_matches import ExplainedQuery, Explanation, TokenMatch

# An image of 6 rows and 8 columns of patches, which no processor needs to resize but ColPali's.
COLUMNS = 8
ROWS = 6
ARCHITECTURES = [
    pytest.param(page_processors.colpali_processor, id="colpali"),
    pytest.param(page_processors.colqwen2_processor, id="colqwen2"),
    pytest.param(page_processors.colmodernvbert_processor, id="colmodernvbert"),
]


def page_with_mark(box: Box) -> Any:
    """A white page with a black rectangle."""
    page = Image.new("RGB", (COLUMNS * PATCH_PIXELS, ROWS * PATCH_PIXELS), "white")
    corners = (
        round(box.left * page.width),
        round(box.top * page.height),
        round(box.right * page.width),
        round(box.bottom * page.height),
    )
    page.paste("black", corners)
    return page


def center(box: Box) -> tuple[float, float]:
    """The horizontal and the vertical center of a box."""
    return (box.left + box.right) / 2, (box.top + box.bottom) / 2


@pytest.mark.parametrize("make_processor", ARCHITECTURES)
def test_a_token_covers_the_part_of_the_page_whose_pixels_its_patch_has(
    make_processor: Callable[[], Any],
) -> None:
    processor = make_processor()
    model = page_model(processor, patches_only=True)
    grid = patch_grid(model, page_with_mark(Box(0, 0, 0, 0)))
    for token in range(len(grid.cells)):
        box = grid.box(token)
        assert box is not None
        page = page_with_mark(box)
        brightness = patch_brightness(processor, model.preprocess([page], task="document"))
        darkest = brightness <= brightness.min() + 0.05
        assert darkest[token], f"token {token}"
        # A patch of the complete image is dark together with the patches of the tiles below it.
        for dark_token in darkest.nonzero().flatten().tolist():
            dark_box = grid.box(dark_token)
            assert dark_box is not None
            horizontal, vertical = center(dark_box)
            assert box.left < horizontal < box.right
            assert box.top < vertical < box.bottom


@pytest.mark.parametrize("make_processor", ARCHITECTURES)
def test_the_heat_map_points_at_the_patch_where_a_vector_was_planted(
    make_processor: Callable[[], Any],
) -> None:
    model = page_model(make_processor())
    page = page_with_mark(Box(0, 0, 0, 0))
    scored = scored_tokens(model, page, "document")
    grid = patch_grid(model, page, scored)
    patches = [token for token in range(len(grid.cells)) if grid.box(token) is not None]
    assert len(patches) < len(scored.ids), "words of the prompt are scored too"
    query_tokens = scored_tokens(model, "red", "query")
    query_vectors = torch.eye(8)[torch.arange(len(query_tokens.ids)) % 2]
    explained = ExplainedQuery(model, "red", query_vectors)
    for planted in (patches[0], patches[len(patches) // 2], patches[-1]):
        document_vectors = torch.eye(8)[torch.full((len(scored.ids),), 5)]
        document_vectors[planted] = torch.eye(8)[:2].sum(dim=0)
        explanation = explained.explain("page", page, document_vectors)
        assert {match.document_position for match in explanation.matches} == {planted}
        assert {match.box for match in explanation.matches} == {grid.box(planted)}
        heat = explanation.heat()
        first_row, first_column, end_row, end_column = grid.cells[planted].tolist()
        expected = torch.zeros(grid.n_rows, grid.n_columns, dtype=torch.bool)
        expected[first_row:end_row, first_column:end_column] = True
        assert torch.equal(heat == heat.max(), expected)


def test_words_of_the_prompt_are_no_patches() -> None:
    model = page_model(page_processors.colpali_processor())
    page = page_with_mark(Box(0, 0, 0, 0))
    scored = scored_tokens(model, page, "document")
    grid = patch_grid(model, page, scored)
    boxes = {name: grid.box(token) for token, name in enumerate(scored.names)}
    assert boxes["Describe"] is None
    assert boxes["<image>"] is not None


def test_a_small_image_is_one_tile() -> None:
    model = page_model(page_processors.colmodernvbert_processor())
    model[0].processor.image_processor.size = {"longest_edge": TILE_SIDE * PATCH_PIXELS}
    grid = patch_grid(model, Image.new("RGB", (40, 40), "white"))
    assert (grid.n_rows, grid.n_columns) == (TILE_SIDE, TILE_SIDE)


def test_tokens_of_a_tile_are_row_by_row_after_the_connector() -> None:
    from transformers.models.modernvbert.modeling_modernvbert import ModernVBertConnector

    side = 6
    numbers = torch.arange(side * side).reshape(1, -1, 1)
    shuffled = ModernVBertConnector.pixel_shuffle(None, numbers, 2)
    first_pixels = shuffled[0].min(dim=1).values.reshape(side // 2, side // 2)
    expected = torch.arange(side * side).reshape(side, side)[::2, ::2]
    assert torch.equal(first_pixels, expected)


def test_heat_equals_the_similarity_map_of_sentence_transformers() -> None:
    from sentence_transformers.multi_vector_encoder.interpretability import (
        get_n_patches,
        maxsim_similarity_map,
    )

    model = page_model(page_processors.colqwen2_processor(), patches_only=True)
    page = page_with_mark(Box(0, 0, 0, 0))
    grid = patch_grid(model, page)
    generator = torch.Generator().manual_seed(0)
    query_vectors = torch.randn(3, 8, generator=generator)
    page_vectors = torch.randn(len(grid.cells), 8, generator=generator)
    n_patches = get_n_patches(model, page.size)
    expected = maxsim_similarity_map(query_vectors, page_vectors, n_patches)
    torch.testing.assert_close(grid.heat(query_vectors @ page_vectors.T), expected)


def test_a_text_model_has_no_patches(late: Any) -> None:
    with pytest.raises(ValueError, match="model: expected a model of page images"):
        patch_grid(late, Image.new("RGB", (8, 8)), scored_tokens(late, "cats", "document"))


def test_a_page_of_another_model_is_refused() -> None:
    model = page_model(page_processors.colpali_processor())
    n_tokens = len(scored_tokens(model, "red", "query").ids)
    explained = ExplainedQuery(model, "red", torch.zeros(n_tokens, 8))
    with pytest.raises(DataError, match="expected one vector per token of 'page', got 3 vectors"):
        explained.explain("page", page_with_mark(Box(0, 0, 0, 0)), torch.zeros(3, 8))


def test_the_drawn_map_is_hottest_at_the_hottest_cell() -> None:
    page = Image.new("RGB", (80, 60), "white")
    heat = torch.zeros(6, 8)
    heat[4, 1] = 1.0
    drawn = draw_heat_map(page, heat)
    assert drawn.size == page.size
    hottest = drawn.getpixel((15, 45))
    coolest = drawn.getpixel((75, 5))
    assert sum(hottest) > sum(coolest) + 100


def test_cells_that_no_token_covers_are_drawn_as_the_coolest() -> None:
    page = Image.new("RGB", (80, 60), "white")
    heat = torch.full((6, 8), -torch.inf)
    assert ImageChops.difference(draw_heat_map(page, heat), page).getbbox() is None
    heat[0, 0] = 1.0
    heat[0, 1] = 0.5
    drawn = draw_heat_map(page, heat)
    assert drawn.getpixel((15, 55)) == drawn.getpixel((75, 55))


def test_the_box_of_each_match_is_drawn_in_its_color() -> None:
    grid = PatchGrid(2, 2, torch.tensor([[0, 0, 1, 1], [1, 1, 2, 2]]))
    match = TokenMatch(
        query_position=0,
        query_token="red",
        is_content=True,
        document_position=1,
        document_token="<image>",
        similarity=1.0,
        box=grid.box(1),
    )
    explanation = Explanation([match], torch.tensor([[0.0, 1.0]]), grid)
    drawn = explanation.draw(Image.new("RGB", (200, 200), "white"))
    assert drawn.size == (200, 200)
    assert drawn.getpixel((100, 190)) == ImageColor.getrgb("#d62728")
    assert drawn.getpixel((110, 190)) != ImageColor.getrgb("#d62728")
