"""Copies of tokenizers that share their vocabulary."""

from __future__ import annotations

import itertools
from typing import Any


def copy_tokenizer(tokenizer: Any) -> Any:
    """Copy a tokenizer of the package `tokenizers`.

    Truncation, padding and added tokens of the copy can be changed without an effect on the
    original. Both share the vocabulary, the normalizer and the other steps. A copy by
    ``Tokenizer.from_str(tokenizer.to_str())`` would read the vocabulary again, which takes long for
    a large one and blocks all threads. It is made only if the first copy would differ.

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
    # Tokens get ascending ids as they are added. They are therefore added in the order of their
    # ids, in runs of special and of other tokens, for which there are different methods.
    added_tokens = [token for _, token in tokens_by_id]
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
