"""Texts that a model reads the beginning of only cost no more, and are counted in every way to
vectors.
"""

from __future__ import annotations

import base64
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sentence_transformers import (
    CrossEncoder,
    MultiVectorEncoder,
    SentenceTransformer,
    SparseEncoder,
)
from sentence_transformers.base.modules import Router, Transformer
from sentence_transformers.multi_vector_encoder.modules import MultiVectorMask
from sentence_transformers.sentence_transformer.modules import Pooling
from sentence_transformers.sparse_encoder.modules import SparseStaticEmbedding, SpladePooling
from transformers import AutoTokenizer, PreTrainedTokenizerBase
from transformers.models.bert.tokenization_bert_legacy import BertTokenizerLegacy

from tests.recipes.small import byte_pairs
from tests.retrieval.encoding.test_interruptions import stop_at
from tests.retrieval.training_data.test_teachers import reranker
from tilefold.integrations.sentence_transformers import accelerate
from tilefold.modules.echo import EchoTransformer
from tilefold.pipeline.truncation import counting_truncation, tally_truncation
from tilefold.retrieval import (
    encode_collection,
    encode_queries,
    encode_texts,
    encode_tokens,
    read_manifest,
)
from tilefold.retrieval.encoding.dense import encode_dense
from tilefold.retrieval.encoding.truncation import PrefixTokenizer, shorten_texts

LIMIT = 64
# beside the limit with and without special tokens and a prompt, and far beyond; an end that is
# nothing, and one that is
COUNTS = (0, 1, 58, 59, 60, 61, 62, 63, 64, 65, 66, 200, 3000)
TEXTS = {f"n{count}": "cats " * count for count in COUNTS}
TEXTS |= {"spaces": "cats " * 62 + " " * 5000, "end": "cats " * 62 + " " * 5000 + "cats"}
BASE64 = base64.b64encode(np.random.default_rng(0).bytes(60_000)).decode()
UNKNOWN: dict[str, Any] = {"unk_token": "<unk>"}
JAPANESE = "ねこがあたたかいきのうえでねむっている、いぬは走った。㍿カフェ１２３" * 2000
WORDS = ["cats", "sleep", "on", "warm", "trees,", "and", "dogs", "don't", ""]
CUT = 7  # of them, with two special tokens and without a prompt


@pytest.fixture(scope="module", params=["plain", "accelerated"])
def way(request: pytest.FixtureRequest) -> Any:
    return accelerate if request.param == "accelerated" else lambda model: nullcontext()


def longer(model: Any, prompt: str = "", special: bool = True, limit: int = LIMIT) -> int:
    """How many of the texts have more tokens than the limit, by a tokenizer that cuts nothing."""
    tokenizer = AutoTokenizer.from_pretrained(model.tokenizer.name_or_path)
    ids = tokenizer(
        [prompt + text for text in TEXTS.values()],
        add_special_tokens=special,
        verbose=False,
    )["input_ids"]
    return sum(len(row) > limit for row in ids)


@pytest.mark.parametrize("kind", ["document", "query"])
def test_the_manifest_says_how_many_texts_were_cut(
    splade: Any,
    way: Any,
    kind: Any,
    tmp_path: Path,
) -> None:
    prompt = splade.prompts[kind]
    expected = {"count": longer(splade, prompt), "max_length": LIMIT}
    assert (expected["count"], longer(splade)) == ((10, CUT) if prompt else (CUT, CUT))
    with way(splade):
        manifest = encode_collection(splade, TEXTS, tmp_path, kind=kind, shard_size=4, batch_size=3)
    assert manifest.truncated == expected and read_manifest(tmp_path).truncated == expected
    assert sum(shard["truncated"]["count"] for shard in manifest.shards) == expected["count"]


@pytest.mark.parametrize("stop", [3, 6, 11])
def test_an_interrupted_run_counts_each_text_once(
    splade: Any,
    way: Any,
    tmp_path: Path,
    stop: int,
) -> None:
    options: dict[str, Any] = {"batch_size": 3, "shard_size": 8, "save_minutes": 0.0}
    with way(splade):
        with pytest.raises(KeyboardInterrupt):
            encode_collection(splade, TEXTS, tmp_path, progress=stop_at(stop), **options)
        manifest = encode_collection(splade, TEXTS, tmp_path, **options)
        assert manifest.truncated == {"count": CUT, "max_length": LIMIT}
        assert encode_collection(splade, TEXTS, tmp_path, **options).truncated == manifest.truncated


def test_a_shard_without_any_text_says_the_same_wherever_it_is_made(
    splade: Any,
    way: Any,
    tmp_path: Path,
) -> None:
    texts: dict[str, Any] = {"a": 1, "b": "cats", "c": 3}
    with way(splade):
        manifest = encode_collection(splade, texts, tmp_path, shard_size=1)
    assert [shard["truncated"]["max_length"] for shard in manifest.shards] == [None, LIMIT, None]
    assert manifest.truncated == {"count": 0, "max_length": LIMIT}


def test_each_route_has_its_own_limit_and_special_tokens(
    splade: Any,
    way: Any,
    tmp_path: Path,
) -> None:
    static = SparseStaticEmbedding(splade.tokenizer, torch.rand(len(splade.tokenizer)))
    router = Router.for_query_document(
        query_modules=[static],
        document_modules=[splade[0], SpladePooling()],
    )
    model = SparseEncoder(modules=[router], device="cpu")
    with way(model):
        document = encode_collection(model, TEXTS, tmp_path / "d")
        query = encode_collection(model, TEXTS, tmp_path / "q", kind="query")
    assert document.truncated["count"] == longer(splade) == CUT
    assert (
        query.truncated == {"count": 4, "max_length": LIMIT} and longer(splade, special=False) == 4
    )


@pytest.mark.parametrize("expansion", [None, "fixed", "min"])
def test_queries_have_a_length_of_their_own(
    splade: Any,
    way: Any,
    tmp_path: Path,
    expansion: str | None,
) -> None:
    folder = splade[0].tokenizer.name_or_path
    given = {} if expansion is None else {"query_expansion": {"strategy": expansion, "length": 62}}
    model = MultiVectorEncoder(
        modules=[
            Transformer(folder, query_length=62, document_length=61, **given),
            MultiVectorMask(),
        ],
        device="cpu",
    )
    with way(model), tally_truncation() as tally:
        documents = encode_tokens(model, TEXTS, tmp_path / "d", shard_size=4)
        queries = encode_tokens(model, TEXTS, tmp_path / "q", kind="query", shard_size=4)
        encode_texts(model, TEXTS, kind="query")
    assert documents.truncated == {"count": longer(splade, limit=61), "max_length": 61}
    assert queries.truncated == {"count": longer(splade, limit=62), "max_length": 62}
    assert tally.sentences() == [
        f"{queries.truncated['count']} of {len(TEXTS)} queries were truncated at 62 tokens",
    ]


def test_both_copies_of_an_echo_share_the_limit_and_bound_no_batch(
    splade: Any,
    way: Any,
    tmp_path: Path,
) -> None:
    transformer = EchoTransformer(splade[0].tokenizer.name_or_path, transformer_task="fill-mask")
    model = SparseEncoder(modules=[transformer, SpladePooling()], device="cpu")
    with way(model):
        with pytest.warns(
            UserWarning,
            match="batch_tokens does nothing for a model whose texts are padded",
        ):
            encode_collection(model, {"a": "cats"}, tmp_path / "warned", batch_tokens=64)
        manifest = encode_collection(
            model,
            {"a": "cats " * 24, "b": "cats " * 40},
            tmp_path / "cut",
        )
    room = manifest.truncated["max_length"]
    assert 20 < room < 32 and manifest.truncated["count"] == sum(count > room for count in (24, 40))


def test_texts_that_are_cut_on_the_left_are_counted(
    splade: Any,
    way: Any,
    tmp_path: Path,
    monkeypatch: Any,
) -> None:
    monkeypatch.setattr(splade.tokenizer, "truncation_side", "left")
    with way(splade):
        assert encode_collection(splade, TEXTS, tmp_path).truncated["count"] == CUT


def test_what_is_encoded_into_memory_is_told(splade: Any, way: Any) -> None:
    with way(splade), tally_truncation() as tally:
        encode_queries(splade, TEXTS, batch_size=4)
        assert tally.sentences() == [f"10 of {len(TEXTS)} queries were truncated at {LIMIT} tokens"]
    modules = [Transformer(splade[0].tokenizer.name_or_path), Pooling(32)]
    dense = SentenceTransformer(
        modules=modules,
        prompts={"query": "find: ", "document": ""},
        device="cpu",
    )
    with tally_truncation() as tally:
        encode_queries(splade, {"q": TEXTS["n200"]})
        encode_dense(dense, TEXTS, kind="document", batch_size=4)
    message = f"{CUT} of {len(TEXTS)} documents were truncated at {LIMIT} tokens"
    assert sorted(tally.sentences()) == [f"1 of 1 queries was truncated at {LIMIT} tokens", message]


def test_pairs_of_a_cross_encoder_are_counted(tmp_path: Path) -> None:
    teacher = CrossEncoder(str(reranker(tmp_path)), device="cpu", max_length=LIMIT)
    pairs = [("cats", text) for text in TEXTS.values()]
    with counting_truncation() as cut:
        teacher.predict(pairs, batch_size=4, show_progress_bar=False)
    full = AutoTokenizer.from_pretrained(str(tmp_path))(
        [a for a, _ in pairs],
        [b for _, b in pairs],
        verbose=False,
    )
    assert (cut.count, cut.max_length) == (
        sum(len(ids) > LIMIT for ids in full["input_ids"]),
        LIMIT,
    )


def test_a_tokenizer_without_rust_is_counted_too(splade: Any, tmp_path: Path) -> None:
    slow = BertTokenizerLegacy(
        str(Path(splade[0].tokenizer.name_or_path) / "vocab.txt"),
        model_max_length=LIMIT,
    )
    stock = PreTrainedTokenizerBase.__call__
    with counting_truncation() as cut:
        with counting_truncation():
            assert PreTrainedTokenizerBase.__call__ is not stock
        slow(list(TEXTS.values()), padding=True, truncation=True, return_tensors="pt")
        slow(TEXTS["n200"], truncation=True, max_length=8)
    assert not slow.is_fast and [len(call.truncated) for call in cut.calls] == [CUT, 1]
    assert [call.max_length for call in cut.calls] == [LIMIT, 8]
    assert PreTrainedTokenizerBase.__call__ is stock, "tokenizers are left as they were"


def test_an_enormous_text_is_cut_and_read_as_before(
    splade: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    long = " ".join(WORDS * 20_000)
    (cut,) = shorten_texts(splade, [long])
    assert long.startswith(cut) and len(cut) < 40 * splade.max_seq_length
    fast = encode_queries(splade, {"q": long}, top_k=30)
    for module in ("encoding.sparse", "encoding.pending_shards"):
        monkeypatch.setattr(
            f"tilefold.retrieval.{module}.shorten_texts", lambda model, texts: texts
        )
    full = encode_queries(splade, {"q": long}, top_k=30)
    assert np.array_equal(fast.indices, full.indices) and np.array_equal(fast.data, full.data)


def test_a_text_is_cut_behind_as_many_tokens_as_the_model_reads(splade: Any) -> None:
    limit = splade.max_seq_length
    words = (
        " " * 100_000 + "cats " * 100_000,
        "q" * 50_000 + " cats" * 100_000,
        "猫が眠る " * 50_000,
    )
    for text in (*words, BASE64, JAPANESE):  # without white space
        (cut,) = shorten_texts(splade, [text])
        assert text.startswith(cut) and len(cut) < (len(text) if text in words else 32 * limit + 1)
        settings: dict[str, Any] = {"truncation": True, "max_length": limit}
        assert (
            splade.tokenizer(cut, **settings)["input_ids"]
            == splade.tokenizer(text, **settings)["input_ids"]
        )


def test_what_cannot_be_cut_safely_is_left_whole(
    splade: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    texts = ["cats", "q" * 200_000, " ".join(WORDS * 100)[: 30 * splade.max_seq_length]]
    assert shorten_texts(splade, texts) == texts
    monkeypatch.setattr(splade.tokenizer, "truncation_side", "left")
    assert shorten_texts(splade, ["cats " * 100_000]) == ["cats " * 100_000]


def test_a_prompt_before_the_text_is_part_of_what_is_shown(
    splade: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(splade, "prompts", {"query": "search_query: ", "document": "title[SEP]"})
    assert shorten_texts(splade, [BASE64]) == [BASE64], (
        "a prompt with a special token is not decided by pieces"
    )
    monkeypatch.setattr(splade, "prompts", {"query": "search_query: ", "document": ""})
    (cut,) = shorten_texts(splade, [BASE64])
    settings: dict[str, Any] = {"truncation": True, "max_length": splade.max_seq_length}
    one, other = (splade.tokenizer("search_query: " + text, **settings) for text in (cut, BASE64))
    assert len(cut) < len(BASE64) and one["input_ids"] == other["input_ids"]


def fast_tokenizer(kind: str) -> Any:
    """A Unigram tokenizer as SentencePiece makes them, or a byte-level BPE, trained on texts
    without white space.
    """
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    parts = [JAPANESE[i : i + 50] for i in range(0, 3000, 37)] + [
        BASE64[i : i + 50] for i in range(0, 3000, 37)
    ]
    if kind == "bpe":
        return byte_pairs(parts)
    made = Tokenizer(models.Unigram())
    made.normalizer = normalizers.NFKC()
    made.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.UnigramTrainer(vocab_size=300, **UNKNOWN, special_tokens=["<unk>"])
    made.train_from_iterator(parts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=made, **UNKNOWN)


@pytest.mark.parametrize("kind", ["unigram", "bpe"])
def test_beginnings_of_one_endless_piece_are_those_of_the_whole(kind: str) -> None:
    tokenizer = fast_tokenizer(kind)
    beginnings, source = PrefixTokenizer(tokenizer), np.random.default_rng(1)
    kana = [chr(code) for code in range(0x3042, 0x3092)]
    shown = 0
    words = ["ねこ", "が", "きのうえ", "ab", "で", "走った", "☃", "カフェ"]
    for text in (
        *("".join(source.choice(kana, 6000)) for _ in range(4)),
        *("".join(source.choice(words, 3000)) for _ in range(4)),
        JAPANESE[:6000].replace("。", "").replace("、", ""),
        BASE64[:8000].replace("+", "").replace("/", ""),
    ):
        full = tokenizer(text, add_special_tokens=False)["input_ids"]
        for size, count in ((900, 10), (1400, 64), (2600, 200)):
            first = beginnings.first_tokens(text[:size], count)
            shown += first is not None
            assert first in (None, full[:count])
    assert shown >= 20, "most beginnings decide their first tokens"


def test_a_beginning_that_what_follows_changes_is_not_taken_for_the_whole() -> None:
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    pieces = [("<unk>", 0.0), ("a", -100.0), ("aa", -1.0), ("aaa", -1.4)]
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.Unigram(pieces, 0)),
        **UNKNOWN,
    )
    first = {
        tuple(tokenizer("a" * size, add_special_tokens=False)["input_ids"][:20])
        for size in range(1000, 1006)
    }
    assert len(first) > 1, "the length of the whole decides the first tokens"
    assert PrefixTokenizer(tokenizer).first_tokens("a" * 1000, 20) is None


def test_combining_characters_at_the_end_decide_nothing(splade: Any) -> None:
    beginnings = PrefixTokenizer(splade.tokenizer)
    assert beginnings.first_tokens("cats sleep " * 40, 16) is not None
    assert beginnings.first_tokens("cats sleep " * 40 + "e" + "\u0301" * 100, 16) is None
    assert beginnings.first_tokens("cats [MASK] sleep " * 40, 16) is None, (
        "special tokens are split off before anything else"
    )
    assert beginnings.first_tokens("q" * 2000, 1) is None, "a word may go on, and be unknown then"
