"""Heat maps of page images: which part of a page matches which token of a query.

A model of page images divides an image into patches, and returns one token vector per patch. A
:class:`PatchGrid` says which cells of the image each token covers. The heat of a cell is the
largest similarity of a query token with a page token that covers the cell, so the hottest cell is
the one that MaxSim scored.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from tilefold._internal.arguments import ArgumentError
from tilefold.retrieval.encoding.scored_tokens import ScoredTokens, scored_tokens
from tilefold.retrieval.errors import DataError

if TYPE_CHECKING:
    from PIL.Image import Image

    from tilefold._internal.typing import Model

__all__ = ["Box", "PatchGrid", "draw_heat_map", "draw_matches", "patch_grid"]

# Opacity of a heat map over the page, from 0 to 1.
_OPACITY = 0.45
# Colors of the boxes of query tokens, which repeat if there are more tokens.
_BOX_COLORS = ("#d62728", "#1f77b4", "#2ca02c", "#ff7f0e", "#9467bd", "#8c564b", "#e377c2")
# Line width of a box and height of its label, as fractions of the longer side of the image.
_LINE_FRACTION = 1 / 400
_LABEL_FRACTION = 1 / 60


class Box(NamedTuple):
    """A rectangle of an image, in fractions of its width and height.

    Attributes:
        left: distance of the left side from the left side of the image, from 0 to 1.
        top: distance of the upper side from the top of the image.
        right: distance of the right side from the left side of the image.
        bottom: distance of the lower side from the top of the image.
    """

    left: float
    top: float
    right: float
    bottom: float


@dataclass(frozen=True)
class PatchGrid:
    """The cells of a page image that each token vector of the page covers.

    Attributes:
        n_rows: number of rows of cells.
        n_columns: number of columns of cells.
        cells: first row, first column, row after the last and column after the last that a token
            covers, ``[n, 4]`` integers. A token that is not a patch, such as a word of the prompt,
            has four times -1.
    """

    n_rows: int
    n_columns: int
    cells: Tensor

    def box(self, token: int) -> Box | None:
        """Return the part of the image that a token covers; None if the token is not a patch."""
        first_row, first_column, end_row, end_column = self.cells[token].tolist()
        if first_row < 0:
            return None
        return Box(
            left=first_column / self.n_columns,
            top=first_row / self.n_rows,
            right=end_column / self.n_columns,
            bottom=end_row / self.n_rows,
        )

    def heat(self, similarities: Tensor) -> Tensor:
        """Spread similarities of page tokens over the cells of the image that they cover.

        Args:
            similarities: similarity of each of Q query tokens with each page token, ``[Q, n]``.

        Returns:
            The largest similarity of a page token that covers the cell,
            ``[Q, n_rows, n_columns]``.
        """
        if similarities.dim() != 2 or similarities.size(1) != len(self.cells):
            raise ArgumentError(
                "similarities",
                f"expected shape [Q, {len(self.cells)}], one column per token of the page, got "
                f"{list(similarities.shape)}.",
            )
        heat = similarities.new_full(
            (similarities.size(0), self.n_rows, self.n_columns),
            -math.inf,
        )
        for token, (first_row, first_column, end_row, end_column) in enumerate(self.cells.tolist()):
            if first_row >= 0:  # a token that is not a patch covers no cells
                region = heat[:, first_row:end_row, first_column:end_column]
                torch.maximum(region, similarities[:, token, None, None], out=region)
        return heat


def patch_grid(
    model: Model,
    image: Image,
    tokens: ScoredTokens | None = None,
) -> PatchGrid:
    """Find the cells of an image that its token vectors cover.

    Supported are the fixed grid of ColPali, the grid of ColQwen2, which depends on the size of the
    image and merges patches, and the tiles of Idefics3, SmolVLM and ColModernVBERT, whose last tile
    is the complete image.

    Args:
        model: a ``MultiVectorEncoder`` of page images.
        image: the image, as it was encoded.
        tokens: scored tokens of the image; None computes them.

    Raises:
        DataError: if the processor returns another number of patches than its grid has.
    """
    if tokens is None:
        tokens = scored_tokens(model, image, "document")
    encoder: Any = model
    is_patch = tokens.input_ids == _image_token_id(encoder.processor)
    n_patches = int(is_patch.sum())
    grid = _create_grid(encoder, image, tokens, n_patches)
    if len(grid.patch_cells) != n_patches:
        raise DataError(
            f"image: expected {len(grid.patch_cells)} patches of a grid of {grid.n_rows} x "
            f"{grid.n_columns} cells, got {n_patches} patch tokens from "
            f"{type(encoder.processor).__name__}.",
        )
    # The first and last row and column of each patch; -1 for tokens that are no patches.
    cells = torch.full((len(tokens.input_ids), 4), -1, dtype=torch.int64)
    cells[is_patch] = grid.patch_cells
    cells_of_vectors = cells[tokens.positions]  # only scored tokens have vectors
    return PatchGrid(grid.n_rows, grid.n_columns, cells_of_vectors)


class _Grid(NamedTuple):
    """The cells of an image, and those of each patch.

    Attributes:
        n_rows: number of rows of cells.
        n_columns: number of columns of cells.
        patch_cells: as :attr:`PatchGrid.cells`, of the patches only, in the order of their tokens.
    """

    n_rows: int
    n_columns: int
    patch_cells: Tensor


def _image_token_id(processor: Any) -> int:
    """Return the id of the image token, which occurs once for each patch of an image.

    Raises:
        ArgumentError: if the model reads texts only.
    """
    image_token = getattr(processor, "image_token", None)
    tokenizer = getattr(processor, "tokenizer", None)
    if image_token is None or tokenizer is None:
        raise ArgumentError(
            "model",
            "expected a model of page images, whose processor has an image_token, got the "
            f"processor {type(processor).__name__}.",
        )
    # `image_token_id` of a processor may be that of another tokenizer.
    return int(tokenizer.convert_tokens_to_ids(str(image_token)))


def _create_grid(
    model: Any,
    image: Image,
    tokens: ScoredTokens,
    n_patches: int,
) -> _Grid:
    """Return the grid of cells of an image, and which cells each patch covers.

    Most patches cover one cell. A patch of a downscaled copy of the image covers several cells.

    Args:
        model: a ``MultiVectorEncoder`` of page images.
        image: the image.
        tokens: scored tokens of the image.
        n_patches: number of patch tokens.
    """
    image_processor: Any = getattr(model.processor, "image_processor", None)
    # Only processors that can divide images into tiles have this option. If it is off, the
    # complete image is the only tile.
    can_divide_images = getattr(image_processor, "do_image_splitting", None) is not None
    if can_divide_images:
        n_tile_rows, n_tile_columns = _count_tiles(model, image)
        n_tiles = n_tile_rows * n_tile_columns + 1  # the last tile is the complete image
        return _create_grid_of_tiles(n_tile_rows, n_tile_columns, n_patches // n_tiles)
    sizes = tokens.features.get("image_grid_thw")
    if sizes is not None:
        # The grid is counted before merge_size x merge_size patches are merged into one token. The
        # first number counts frames, and is 1 for an image.
        _, n_unmerged_rows, n_unmerged_columns = sizes[0].tolist()
        n_rows = n_unmerged_rows // image_processor.merge_size
        n_columns = n_unmerged_columns // image_processor.merge_size
    else:
        from sentence_transformers.multi_vector_encoder.interpretability import get_n_patches

        n_columns, n_rows = get_n_patches(model, image.size)
    return _Grid(n_rows, n_columns, _row_major_cells(n_rows, n_columns))


def _count_tiles(model: Any, image: Image) -> tuple[int, int]:
    """Count the rows and the columns of tiles into which a processor divides an image.

    Both are 0 for an image that is not divided.

    Args:
        model: a ``MultiVectorEncoder`` whose processor divides images into tiles.
        image: the image.
    """
    options: dict[str, Any] = {}
    for module in model:
        options |= (getattr(module, "processing_kwargs", None) or {}).get("image", {})
    processed = model.processor.image_processor(
        images=[[image.convert("RGB")]],
        **{**options, "return_row_col_info": True},
    )
    return int(processed["rows"][0][0]), int(processed["cols"][0][0])


def _create_grid_of_tiles(n_tile_rows: int, n_tile_columns: int, n_patches_of_tile: int) -> _Grid:
    """Return the cells of an image that is divided into tiles, which all have as many patches.

    The patches are listed tile by tile. The last tile is the complete image at a lower resolution.

    Args:
        n_tile_rows: number of rows of tiles; 0 if the image is not divided.
        n_tile_columns: number of columns of tiles.
        n_patches_of_tile: number of patches of a tile, which is a square number.
    """
    side = math.isqrt(n_patches_of_tile)
    tile_cells = _row_major_cells(side, side)
    if not n_tile_rows:
        return _Grid(side, side, tile_cells)
    cells = []
    for tile_row in range(n_tile_rows):
        for tile_column in range(n_tile_columns):
            # Each tile repeats the cells of the first tile, shifted by its place in the image.
            shift = torch.tensor([tile_row, tile_column, tile_row, tile_column]) * side
            cells.append(tile_cells + shift)
    # A patch of the complete image covers as many cells as there are tiles in each direction.
    stretch = torch.tensor([n_tile_rows, n_tile_columns, n_tile_rows, n_tile_columns])
    cells.append(tile_cells * stretch)
    return _Grid(n_tile_rows * side, n_tile_columns * side, torch.cat(cells))


def _row_major_cells(n_rows: int, n_columns: int) -> Tensor:
    """Return the bounds of one cell per patch, row by row, ``[n_rows * n_columns, 4]``.

    The bounds are first row, first column, row after the last and column after the last.
    """
    rows = torch.arange(n_rows).repeat_interleave(n_columns)
    columns = torch.arange(n_columns).repeat(n_rows)
    return torch.stack([rows, columns, rows + 1, columns + 1], dim=1)


def draw_heat_map(image: Image, heat: Tensor) -> Image:
    """Draw a heat map over an image.

    Args:
        image: the page.
        heat: heat of the cells, ``[n_rows, n_columns]``. Cells that no token covers are -inf.

    Returns:
        A new RGB image of the same size. Colors span the range of the finite heat.
    """
    from sentence_transformers.multi_vector_encoder.interpretability import (
        render_similarity_map_on_image,
    )

    is_covered = heat.isfinite()
    if not is_covered.any():
        return image.convert("RGB")
    coolest = float(heat[is_covered].min())
    hottest = float(heat[is_covered].max())
    drawn: Image = render_similarity_map_on_image(
        image.convert("RGB"),
        heat.clamp(min=coolest),
        alpha=_OPACITY,
        normalization_range=(coolest, hottest),
    ).convert("RGB")
    return drawn


def draw_matches(image: Image, boxes: Sequence[tuple[str, Box]]) -> Image:
    """Draw the box of the best patch of each query token over an image, with the token.

    Args:
        image: the page, or its heat map.
        boxes: query tokens and the boxes of their best patches.

    Returns:
        A new RGB image of the same size.
    """
    from PIL import ImageDraw, ImageFont

    drawn = image.convert("RGB")
    longer_side = max(drawn.size)
    line_width = max(1, round(longer_side * _LINE_FRACTION))
    font = ImageFont.load_default(size=max(8, round(longer_side * _LABEL_FRACTION)))
    canvas = ImageDraw.Draw(drawn)
    # Labels of tokens whose best patch is the same are written one below the other.
    next_label_top: dict[Box, float] = {}
    for number, (token, box) in enumerate(boxes):
        color = _BOX_COLORS[number % len(_BOX_COLORS)]
        left = box.left * drawn.width
        top = box.top * drawn.height
        right = max(left, box.right * drawn.width - 1)
        bottom = max(top, box.bottom * drawn.height - 1)
        canvas.rectangle((left, top, right, bottom), outline=color, width=line_width)
        label_top = next_label_top.get(box, top)
        background = canvas.textbbox((left, label_top), token, font=font)
        canvas.rectangle(background, fill=color)
        canvas.text((left, label_top), token, fill="white", font=font)
        next_label_top[box] = background[3]
    return drawn
