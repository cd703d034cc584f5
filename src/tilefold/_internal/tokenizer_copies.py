"""Copies of tokenizers that share their vocabulary."""

from __future__ import annotations

import itertools
from typing import Any


def copy_tokenizer(tokenizer: Any) -> Any:
    """Copy a tokenizer of the package `tokenizers`.

    Truncation, padding and added tokens of the copy can be changed without an effect on the
    tokenizer. Both share the vocabulary and the steps before and after it. To read a large
    vocabulary again, as ``Tokenizer.from_str(tokenizer.to_str())`` does, would take long, and no
    other thread of Python could run meanwhile. It is read again only if the copy would differ.

    Args:
        tokenizer: the tokenizer, such as the ``backend_tokenizer`` of transformers.
    """
    from tokenizers import Tokenizer  # a dependency of transformers

    copy = Tokenizer(tokenizer.model)
    for part_name in ("normalizer", "pre_tokenizer", "post_processor", "decoder"):
        part = getattr(tokenizer, part_name)
        if part is not None:
            setattr(copy, part_name, part)
    tokens_by_id = sorted(tokenizer.get_added_tokens_decoder().items())
    added_tokens = [token for _, token in tokens_by_id]  # their ids follow from their order
    for is_special, tokens in itertools.groupby(added_tokens, key=lambda token: token.special):
        if is_special:
            copy.add_special_tokens(list(tokens))
        else:
            copy.add_tokens(list(tokens))
    if tokenizer.truncation is not None:
        copy.enable_truncation(**tokenizer.truncation)
    if tokenizer.padding is not None:
        copy.enable_padding(**tokenizer.padding)
    serialized = tokenizer.to_str()
    if copy.to_str() == serialized:
        return copy
    return Tokenizer.from_str(serialized)
