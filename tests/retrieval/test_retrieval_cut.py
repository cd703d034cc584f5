"""Texts that a model reads the beginning of only are counted, in every way from texts to vectors."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from sentence_transformers import CrossEncoder, MultiVectorEncoder, SentenceTransformer, SparseEncoder
from sentence_transformers.base.modules import Router, Transformer
from sentence_transformers.multi_vector_encoder.modules import MultiVectorMask
from sentence_transformers.sentence_transformer.modules import Pooling
from sentence_transformers.sparse_encoder.modules import SparseStaticEmbedding, SpladePooling
from transformers import AutoTokenizer, PreTrainedTokenizerBase
from transformers.models.bert.tokenization_bert_legacy import BertTokenizerLegacy

from tests.retrieval.test_retrieval_interruptions import stop_at
from tests.retrieval.test_retrieval_teachers import reranker
from tilefold.integrations.sentence_transformers import accelerate
from tilefold.modules.echo import EchoTransformer
from tilefold.pipeline.truncated import tallied, watching
from tilefold.retrieval import (
    encode_collection,
    encode_queries,
    encode_texts,
    encode_tokens,
    read_manifest,
)
from tilefold.retrieval.dense import encode_dense

LIMIT = 64
# beside the limit with and without special tokens and a prompt, and far beyond; an end that is nothing, and one that is
COUNTS = (0, 1, 58, 59, 60, 61, 62, 63, 64, 65, 66, 200, 3000)
TEXTS = {f"n{count}": "cats " * count for count in COUNTS}
TEXTS |= {"spaces": "cats " * 62 + " " * 5000, "end": "cats " * 62 + " " * 5000 + "cats"}
CUT = 7  # of them, with two special tokens and without a prompt


@pytest.fixture(scope="module", params=["plain", "accelerated"])
def way(request: pytest.FixtureRequest) -> Any:
    return accelerate if request.param == "accelerated" else lambda model: nullcontext()


def longer(model: Any, prompt: str = "", special: bool = True, limit: int = LIMIT) -> int:
    """How many of the texts have more tokens than the limit, by a tokenizer that cuts nothing."""
    tokenizer = AutoTokenizer.from_pretrained(model.tokenizer.name_or_path)
    ids = tokenizer([prompt + text for text in TEXTS.values()], add_special_tokens=special, verbose=False)["input_ids"]
    return sum(len(row) > limit for row in ids)


@pytest.mark.parametrize("kind", ["document", "query"])
def test_the_manifest_says_how_many_texts_were_cut(splade: Any, way: Any, kind: Any, tmp_path: Path) -> None:
    prompt = splade.prompts[kind]
    expected = {"count": longer(splade, prompt), "max_length": LIMIT}
    assert (expected["count"], longer(splade)) == ((10, CUT) if prompt else (CUT, CUT))
    with way(splade):
        manifest = encode_collection(splade, TEXTS, tmp_path, kind=kind, shard_size=4, batch_size=3)
    assert manifest.truncated == expected and read_manifest(tmp_path).truncated == expected
    assert sum(shard["truncated"]["count"] for shard in manifest.shards) == expected["count"]


@pytest.mark.parametrize("stop", [3, 6, 11])
def test_an_interrupted_run_counts_each_text_once(splade: Any, way: Any, tmp_path: Path, stop: int) -> None:
    options: dict[str, Any] = {"batch_size": 3, "shard_size": 8, "save_minutes": 0.0}
    with way(splade):
        with pytest.raises(KeyboardInterrupt):
            encode_collection(splade, TEXTS, tmp_path, progress=stop_at(stop), **options)
        manifest = encode_collection(splade, TEXTS, tmp_path, **options)
        assert manifest.truncated == {"count": CUT, "max_length": LIMIT}
        assert encode_collection(splade, TEXTS, tmp_path, **options).truncated == manifest.truncated


def test_a_text_that_fails_does_not_change_the_count_of_the_others(
    splade: Any, way: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    preprocess = splade.preprocess

    def explode(batch: list[str], **options: Any) -> Any:
        if any("boom" in text for text in batch):
            raise RuntimeError("tokenizer gave up")
        return preprocess(batch, **options)

    with way(splade):
        monkeypatch.setattr(splade, "preprocess", explode)
        manifest = encode_collection(splade, {**TEXTS, "bad": "boom " * 20, "none": None}, tmp_path, batch_size=4)  # type: ignore[dict-item]
    assert list(manifest.failed) == ["bad", "none"] and manifest.truncated["count"] == CUT


def test_a_shard_without_any_text_says_the_same_wherever_it_is_made(splade: Any, way: Any, tmp_path: Path) -> None:
    texts: dict[str, Any] = {"a": 1, "b": "cats", "c": 3}
    with way(splade):
        manifest = encode_collection(splade, texts, tmp_path, shard_size=1)
    assert [shard["truncated"]["max_length"] for shard in manifest.shards] == [None, LIMIT, None]
    assert manifest.truncated == {"count": 0, "max_length": LIMIT}


def test_each_route_has_its_own_limit_and_special_tokens(splade: Any, way: Any, tmp_path: Path) -> None:
    static = SparseStaticEmbedding(splade.tokenizer, torch.rand(len(splade.tokenizer)))
    router = Router.for_query_document(query_modules=[static], document_modules=[splade[0], SpladePooling()])
    model = SparseEncoder(modules=[router], device="cpu")
    with way(model):
        document = encode_collection(model, TEXTS, tmp_path / "d")
        query = encode_collection(model, TEXTS, tmp_path / "q", kind="query")
    assert document.truncated["count"] == longer(splade) == CUT
    assert (
        query.truncated == {"count": longer(splade, special=False), "max_length": LIMIT}
        and query.truncated["count"] == 4
    )


@pytest.mark.parametrize("expansion", [None, "fixed", "min"])
def test_queries_of_token_vectors_are_cut_where_their_own_length_ends(
    splade: Any, way: Any, tmp_path: Path, expansion: str | None
) -> None:
    folder = splade[0].tokenizer.name_or_path
    given = {} if expansion is None else {"query_expansion": {"strategy": expansion, "length": 62}}
    model = MultiVectorEncoder(
        modules=[Transformer(folder, query_length=62, document_length=61, **given), MultiVectorMask()], device="cpu"
    )
    with way(model), tallied() as tally:
        documents = encode_tokens(model, TEXTS, tmp_path / "d", shard_size=4)
        queries = encode_tokens(model, TEXTS, tmp_path / "q", kind="query", shard_size=4)
        encode_texts(model, TEXTS, kind="query")
    assert documents.truncated == {"count": longer(splade, limit=61), "max_length": 61}
    assert queries.truncated == {"count": longer(splade, limit=62), "max_length": 62}
    assert tally.lines() == [f"{queries.truncated['count']} of {len(TEXTS)} queries were cut at 62 tokens"]


def test_both_copies_of_an_echo_share_the_limit_and_bound_no_batch(splade: Any, way: Any, tmp_path: Path) -> None:
    transformer = EchoTransformer(splade[0].tokenizer.name_or_path, transformer_task="fill-mask")
    model = SparseEncoder(modules=[transformer, SpladePooling()], device="cpu")
    with way(model):
        with pytest.warns(UserWarning, match="batch_tokens does nothing for a model whose texts are padded"):
            encode_collection(model, {"a": "cats"}, tmp_path / "warned", batch_tokens=64)
        manifest = encode_collection(model, {"a": "cats " * 24, "b": "cats " * 40}, tmp_path / "cut")
    room = manifest.truncated["max_length"]
    assert 20 < room < 32 and manifest.truncated["count"] == sum(count > room for count in (24, 40))


def test_texts_that_are_cut_on_the_left_are_counted(splade: Any, way: Any, tmp_path: Path) -> None:
    splade.tokenizer.truncation_side = "left"
    try:
        with way(splade):
            assert encode_collection(splade, TEXTS, tmp_path).truncated["count"] == CUT
    finally:
        splade.tokenizer.truncation_side = "right"


def test_what_is_encoded_into_memory_is_told(splade: Any, way: Any) -> None:
    with way(splade), tallied() as tally:
        encode_queries(splade, TEXTS, batch_size=4)
        assert tally.lines() == [f"10 of {len(TEXTS)} queries were cut at {LIMIT} tokens"]
    modules = [Transformer(splade[0].tokenizer.name_or_path), Pooling(32)]
    dense = SentenceTransformer(modules=modules, prompts={"query": "find: ", "document": ""}, device="cpu")
    with tallied() as tally:
        encode_queries(splade, {"q": TEXTS["n200"]})
        encode_dense(dense, TEXTS, kind="document", batch_size=4)
    said = f"{CUT} of {len(TEXTS)} documents were cut at {LIMIT} tokens"
    assert sorted(tally.lines()) == [f"1 of 1 queries was cut at {LIMIT} tokens", said]


def test_pairs_of_a_cross_encoder_are_counted(tmp_path: Path) -> None:
    teacher = CrossEncoder(str(reranker(tmp_path)), device="cpu", max_length=LIMIT)
    pairs = [("cats", text) for text in TEXTS.values()]
    with watching() as cut:
        teacher.predict(pairs, batch_size=4, show_progress_bar=False)
    whole = AutoTokenizer.from_pretrained(str(tmp_path))([a for a, _ in pairs], [b for _, b in pairs], verbose=False)
    assert (cut.count, cut.max_length) == (sum(len(ids) > LIMIT for ids in whole["input_ids"]), LIMIT)


def test_a_tokenizer_without_rust_is_counted_too(splade: Any, tmp_path: Path) -> None:
    folder = Path(splade[0].tokenizer.name_or_path)
    slow = BertTokenizerLegacy(str(folder / "vocab.txt"), model_max_length=LIMIT)
    stock = PreTrainedTokenizerBase.__call__
    with watching() as cut:
        with watching():
            assert PreTrainedTokenizerBase.__call__ is not stock
        slow(list(TEXTS.values()), padding=True, truncation=True, return_tensors="pt")
        slow(TEXTS["n200"], truncation=True, max_length=8)
    assert not slow.is_fast and [len(call.cut) for call in cut.calls] == [CUT, 1]
    assert [call.max_length for call in cut.calls] == [LIMIT, 8]
    assert PreTrainedTokenizerBase.__call__ is stock, "tokenizers are left as they were"
