"""A sentence-transformers module whose transformers model has learned alphas."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sentence_transformers.base.modules import Transformer

from tilefold.integrations.transformers._attention import register
from tilefold.integrations.transformers._checkpoint import has_learned_alpha, load_learned_alpha

_HUB = ("subfolder", "revision", "token", "cache_dir", "local_files_only")


class EntmaxTransformer(Transformer):
    """The stock ``Transformer`` that also loads learned alphas, with ``SentenceTransformer(folder)`` and on resuming.

    :func:`tilefold.integrations.transformers.learn_alpha` makes the modules of a model into this. A checkpoint names it
    in ``modules.json``; since it is no class of sentence-transformers, that asks for ``trust_remote_code=True`` from
    version 6 on (what runs is the installed tilefold), and fails where tilefold is not installed.

    Args:
        model_name_or_path: as for ``Transformer``.
        kwargs: as for ``Transformer``.
    """

    __module__ = "tilefold.integrations.sentence_transformers.entmax"  # where checkpoints look for it

    def __init__(self, model_name_or_path: str | Path, **kwargs: Any) -> None:
        register()
        super().__init__(model_name_or_path, **kwargs)
        if has_learned_alpha(self.model):
            given = kwargs.get("model_kwargs") or {}
            load_learned_alpha(self.model, model_name_or_path, {name: given[name] for name in _HUB if name in given})
