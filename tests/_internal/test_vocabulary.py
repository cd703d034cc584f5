"""Terms without a token: heads with more rows than the tokenizer has tokens, and gaps in its ids."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import AutoTokenizer, BertConfig, BertForMaskedLM, PreTrainedTokenizerFast

from tests.cli.program import run_cli
from tests.recipes.small import SIZES, SPECIAL, make_tokenizer_folder
from tests.serve.running import Client, serving
from tilefold import retrieval as r
from tilefold._internal import vocabulary
from tilefold._internal.vocabulary import TermNames, fill_missing_names, term_names_of
from tilefold.modules import StaticQuery
from tilefold.recipes.loading import load_saved
from tilefold.serve.models import Served, TextTokens
from tilefold.serve.service import Service

TOKENS = 60
AFTER_GAP = 70  # id of the one token behind the gap
TERMS = 80  # rows of the head
NUMERIC_TOKEN = 50  # id of the token "75", which reads like the number of a term
ACTIVE = (74, 75)  # terms without a token that every text has
TEXTS = {"a": "w1 zebra", "b": "w2 75"}


def gapped_tokenizer() -> PreTrainedTokenizerFast:
    """Tokenizer with 61 tokens, one of which has the id 70."""
    vocabulary = {token: number for number, token in enumerate(SPECIAL)}
    vocabulary |= {f"w{number}": number for number in range(len(SPECIAL), TOKENS)}
    del vocabulary[f"w{NUMERIC_TOKEN}"]
    vocabulary |= {"75": NUMERIC_TOKEN, "w1": 5, "w2": 6, "zebra": AFTER_GAP}
    del vocabulary["w5"], vocabulary["w6"]
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token=SPECIAL[1]))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        special_tokens=[("[CLS]", vocabulary["[CLS]"]), ("[SEP]", vocabulary["[SEP]"])],
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=SPECIAL[0],
        unk_token=SPECIAL[1],
        cls_token=SPECIAL[2],
        sep_token=SPECIAL[3],
        mask_token=SPECIAL[4],
        model_max_length=32,
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Saved masked LM whose head has 80 rows, two of them without a token and always active."""
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("gapped")
    model = BertForMaskedLM(BertConfig(vocab_size=TERMS, max_position_embeddings=32, **SIZES))
    bias = model.get_output_embeddings().bias
    torch.nn.init.constant_(bias, -10.0)
    with torch.no_grad():
        bias[[*ACTIVE, NUMERIC_TOKEN, AFTER_GAP]] = torch.tensor([3.0, 2.0, 1.0, 0.5])
    model.save_pretrained(str(path))
    gapped_tokenizer().save_pretrained(str(path))
    return path


@pytest.fixture(scope="module")
def model(folder: Path) -> Any:
    return load_saved(str(folder), "backbone")


@pytest.fixture(scope="module")
def client(model: Any) -> Any:
    with serving(Service([Served(model, "sparse", "gapped")])) as started:
        yield started


NAMES = {"[term_74]", "[term_75]", "75", "zebra"}


def test_names_are_tokens_or_numbers_and_no_two_are_equal() -> None:
    tokenizer = gapped_tokenizer()
    names = r.term_names(tokenizer, TERMS)
    assert len(set(names)) == TERMS
    assert names[NUMERIC_TOKEN] == "75" and names[AFTER_GAP] == "zebra"
    assert names[60] == "[term_60]" and names[75] == "[term_75]"
    tokenizer.add_tokens(["[term_75]"])  # becomes the id 61, in the gap
    names = r.term_names(tokenizer, TERMS)
    added = tokenizer.convert_tokens_to_ids("[term_75]")
    assert names[added] == "[term_75]" and names[75] == "[[term_75]]"
    assert len(set(names)) == TERMS


def test_of_two_tokens_with_one_id_the_tokenizers_own_is_the_name() -> None:
    names = TermNames({"old": 0, "new": 0, "other": 1}, {0: "new", 1: "other"}.get)
    assert [names[term] for term in range(3)] == ["new", "other", "[term_2]"]


def test_an_id_whose_token_belongs_to_another_id_is_named_by_its_number() -> None:
    names = TermNames({"piece": 1, "end": 0}, {0: "end", 1: "piece", 2: "piece"}.get)
    assert [names[term] for term in range(3)] == ["end", "piece", "[term_2]"]


def test_missing_tokens_of_a_list_are_named_by_their_numbers() -> None:
    assert fill_missing_names(["a", None, "[term_1]", None]) == [
        "a",
        "[[term_1]]",
        "[term_1]",
        "[term_3]",
    ]


def test_names_are_cached_while_the_tokenizer_lives() -> None:
    tokenizer = gapped_tokenizer()
    assert term_names_of(tokenizer) is term_names_of(tokenizer)


def test_a_vocabulary_that_is_read_token_by_token_is_that_of_get_vocab(tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(make_tokenizer_folder(tmp_path))
    tokenizer.add_tokens(["zzyzx"])
    assert vocabulary._read_token_by_token(tokenizer) == tokenizer.get_vocab()


def test_a_vocabulary_with_gaps_is_not_read_token_by_token() -> None:
    tokenizer = gapped_tokenizer()
    assert vocabulary._read_token_by_token(tokenizer) is None
    fingerprint = vocabulary.vocabulary_fingerprint(tokenizer)
    assert fingerprint == vocabulary._digest(tokenizer.get_vocab())


@pytest.mark.parametrize("export", ["jsonl", "opensearch", "vespa"])
def test_exports_name_terms_without_a_token(tmp_path: Path, export: str) -> None:
    vectors = r.SparseVectors.from_rows({"a": {74: 1.0, 75: 2.0, 50: 0.5}}, TERMS)
    tokens = gapped_tokenizer().convert_ids_to_tokens(range(TERMS))
    assert tokens[74] is None
    if export == "jsonl":
        r.export_jsonl(vectors, tmp_path / "a.jsonl", tokens)
        exported = json.loads((tmp_path / "a.jsonl").read_text())["vector"]
    elif export == "opensearch":
        r.export_opensearch(vectors, tmp_path / "out", tokens)
        lines = (tmp_path / "out" / "bulk-00000.ndjson").read_text().splitlines()
        exported = json.loads(lines[1])["sparse"]
    else:
        r.export_vespa(vectors, tmp_path / "out", tokens)
        put = json.loads((tmp_path / "out" / "feed.jsonl").read_text())
        exported = put["fields"]["sparse"]["cells"]
    assert exported == {"[term_74]": 1.0, "[term_75]": 2.0, "75": 0.5}


def test_commands_write_and_export_terms_without_a_token(folder: Path, tmp_path: Path) -> None:
    documents = {name: r.Document(name, "", text) for name, text in TEXTS.items()}
    r.Collection("gapped", documents, {}, {}).save_beir(tmp_path / "data")
    vectors, lines = tmp_path / "vectors", tmp_path / "lines.jsonl"
    made_by = ("--model", folder)
    arguments = ("--data", tmp_path / "data", "--output", vectors, "--jsonl", lines)
    assert run_cli("encode", *made_by, *arguments) == 0
    for line in lines.read_text().splitlines():
        assert set(json.loads(line)["vector"]) == NAMES
    output = tmp_path / "opensearch"
    to = ("--to", "opensearch", "--output", output)
    assert run_cli("export", "--vectors", vectors, *made_by, *to) == 0
    _, source, *_ = (output / "bulk-00000.ndjson").read_text().splitlines()
    assert set(json.loads(source)["sparse"]) == NAMES


def test_explanations_name_terms_without_a_token(model: Any) -> None:
    vectors = r.encode_queries(model, TEXTS)
    searcher = r.Searcher(r.build_index(vectors), model, vectors=vectors)
    for hit in searcher.search("w1"):
        assert {term["term"] for term in hit["terms"]} == NAMES


def test_the_server_names_terms_without_a_token(client: Client) -> None:
    (row,) = client.post("/embed_sparse", {"inputs": "w1", "format": "tokens"}).json
    assert set(row) == NAMES


def test_the_server_takes_ids_above_the_number_of_tokens(client: Client) -> None:
    (tokens,) = client.post("/tokenize", {"inputs": "zebra", "add_special_tokens": False}).json
    assert [token["id"] for token in tokens] == [AFTER_GAP] and AFTER_GAP > TOKENS
    assert client.post("/decode", {"ids": [AFTER_GAP]}).json == ["zebra"]
    (special,) = client.post("/tokenize", {"inputs": "zebra"}).json
    ids = [token["id"] for token in special]
    by_ids = client.post("/embed_sparse", {"inputs": [ids]})
    assert by_ids.status == 200
    assert by_ids.json == client.post("/embed_sparse", {"inputs": ["zebra"]}).json


@pytest.mark.parametrize(
    ("path", "field"),
    [
        pytest.param("/decode", "ids", id="decode"),
        pytest.param("/embed_sparse", "inputs", id="input"),
    ],
)
@pytest.mark.parametrize("id_", [60, 71, -1])
def test_the_server_refuses_ids_without_a_token(
    client: Client,
    path: str,
    field: str,
    id_: int,
) -> None:
    reply = client.post(path, {field: [[5, id_]]})
    assert reply.status == 422
    if id_ >= 0:  # negative ones are refused before
        expected = f"token ids: expected numbers from 0 to {AFTER_GAP} that a token has, got {id_}"
        assert expected in reply.json["error"]


def test_a_server_text_of_a_term_is_never_that_of_another() -> None:
    text = TextTokens(gapped_tokenizer())
    assert len({text.term_name(term) for term in range(TERMS)}) == TERMS


def test_a_static_query_has_a_weight_for_the_largest_id() -> None:
    tokenizer = gapped_tokenizer()
    query = StaticQuery(tokenizer)
    assert query.vocab_size == AFTER_GAP + 1
    features = dict(tokenizer(["zebra"], return_tensors="pt", add_special_tokens=False))
    scores = query(features)["sentence_embedding"]
    assert scores.to_dense().nonzero().tolist() == [[0, AFTER_GAP]]
    assert not query.fits_stock()
    with pytest.raises(ValueError, match="token ids without gaps"):
        query.stock()
