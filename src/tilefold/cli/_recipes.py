"""Options of ``tilefold train`` become the configuration of a recipe."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from tilefold.cli import _common
from tilefold.cli._common import UsageError

# parameters of train that some recipes have
_SPARSE = ("regularizer", "group_by_length")
_COLBERT = ("dimension", "query_length", "expand_queries", "keep_punctuation")
# field of a recipe -> parameter of the command that sets it, where its own name does not
_PARAMETERS = {
    "negatives": "",    "base_model": "model", "max_steps": "steps", "skip_punctuation": "keep_punctuation",
    "query_regularizer": "regularizer", "document_regularizer": "regularizer",
    "output_dir": "output", "query_regularizer.weight": "regularizer", "document_regularizer.weight": "regularizer",
}  # fmt: skip


def configure(name: str, values: Mapping[str, Any], asked: Mapping[str, Any]) -> Any:
    """The recipe `name` with the given `values` of its fields, with what was `asked` for of some recipes and --set."""
    from tilefold.recipes.catalogue import RECIPES, get_recipe

    if name not in RECIPES:
        raise UsageError(f"--recipe: expected one of {', '.join(RECIPES)}, got {name!r}.")
    _common.options.update({field: _common.options[option] for field, option in _PARAMETERS.items() if option})
    late = type(RECIPES[name].recipe).__name__ == "ColbertRecipe"
    whose = "the sparse recipes" if late else "--recipe colbert"
    _common.refuse(_SPARSE if late else _COLBERT, f"belongs to {whose}: leave it out for {name}")
    own = {option: asked[option] for option in (*_SPARSE, *_COLBERT) if option in _common.given}
    try:
        recipe = get_recipe(name, **_common.known(values))
        return type(recipe).from_dict(_changed(recipe.to_dict(), own, asked["fields"] or []))
    except ValueError as error:
        raise UsageError(str(error)) from error


def _changed(recipe: dict[str, Any], own: Mapping[str, Any], fields: list[str]) -> dict[str, Any]:
    for option, value in own.items():
        if option == "regularizer":
            put = [_put_weight(recipe, side, value) for side in ("query_regularizer", "document_regularizer")]
            if not any(put):
                raise UsageError("--regularizer does nothing for this recipe, which has no penalty: leave it out.")
        elif option == "keep_punctuation":
            recipe["skip_punctuation"] = False
        else:
            recipe[option] = value or None if option == "dimension" else value
    places = [text.partition("=")[0] for text in fields]
    for place in places:
        also = _common.given.get(_PARAMETERS.get(place, place))
        if also is not None or places.count(place) > 1:
            both = f" (--set and {also})" if also else ""
            raise UsageError(f"--set: {place}: expected once, got it twice{both}: leave one out.")
    for text in fields:
        _set(recipe, text)
    return recipe


def _put_weight(recipe: dict[str, Any], side: str, weight: float) -> bool:
    """Whether the side has a penalty that now has this weight."""
    if not isinstance(recipe[side], dict):
        recipe[side] = weight
    elif recipe[side]["kind"] != "none":
        recipe[side]["weight"] = weight
    else:
        return False
    return True


def _set(recipe: dict[str, Any], text: str) -> None:
    """Apply ``field=value`` or ``field.field=value``; the value is JSON, or a word."""
    path, mark, word = text.partition("=")
    *parents, last = path.split(".")
    if not mark or not last:
        raise UsageError(f"--set: expected FIELD=VALUE, got {text!r}.")
    place: Any = recipe
    for name in parents:
        place = place.get(name) if isinstance(place, dict) else None
    if not isinstance(place, dict) or (not parents and last not in place):
        inside = place if isinstance(place, dict) else recipe
        raise UsageError(f"--set: there is no field {path!r}; the fields are {', '.join(inside)}.")
    try:
        place[last] = json.loads(word)
    except ValueError:
        place[last] = word
