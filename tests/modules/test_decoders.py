"""PROSPER (literal residual, window, norm, penalty on base weights) and echo inputs on decoders."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from sentence_transformers import SparseEncoder
from sentence_transformers.base.modules import Router
from sentence_transformers.sparse_encoder.losses import SparseMultipleNegativesRankingLoss

from tests.integrations.splade_models import CAUSAL_OPTIONS
from tests.modules.batches import same
from tests.recipes.small import TEXTS, causal_splade, dense, small_masked_lm, tiny_causal_lm
from tilefold.integrations.sentence_transformers import accelerate, encode_sparse
from tilefold.losses import GlobalFlopsLoss
from tilefold.losses.base_splade import BaseSpladeLoss
from tilefold.modules.echo import EchoTransformer
from tilefold.modules.head_pooling import pool_logits
from tilefold.modules.prosper import LITERAL_WEIGHTS, ProsperTransformer, literal_residual
from tilefold.modules.window import LexicalWindow, keep_heaviest

KINDS: dict[str, dict[str, Any]] = {
    "causal": CAUSAL_OPTIONS,
    "masked": {"transformer_task": "fill-mask"},
}


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders of a tiny causal and a tiny masked language model."""
    folder = tmp_path_factory.mktemp("bases")
    return {
        "causal": tiny_causal_lm(folder / "causal"),
        "masked": small_masked_lm(folder / "masked"),
    }


def prosper(base: Path, kind: str, **options: Any) -> ProsperTransformer:
    """A PROSPER transformer with the same random weights at every call."""
    torch.manual_seed(3)
    return ProsperTransformer(str(base), **KINDS[kind], **options)


def two_sides(transformer: ProsperTransformer) -> SparseEncoder:
    """A model that keeps 8 normalised terms of queries and 16 terms of documents."""
    query_window = LexicalWindow(8, "l2")
    document_window = LexicalWindow(16)
    router = Router.for_query_document(
        [transformer, query_window],
        [transformer, document_window],
    )
    return SparseEncoder(modules=[router], device="cpu")


def test_residual_by_hand() -> None:
    pooled = torch.tensor([[1.0, 2.0]], dtype=torch.float64, requires_grad=True)
    weight = torch.tensor(
        [[1.0, 0.0], [0.0, 2.0], [3.0, -1.0], [0.5, 0.5]],
        dtype=torch.float64,
        requires_grad=True,
    )
    ids = torch.tensor([[3, 0, 3, 1, 2]])
    mask = torch.tensor([[1, 1, 1, 1, 0]])
    # The importances are 1, 4, 1, 1.5, at most 4. The literal terms are 0, 1, 3, and 2 is masked.
    assert literal_residual(pooled, weight, ids, mask).tolist() == [[3.0, 0.0, 0.0, 2.5]]
    without_first = literal_residual(pooled, weight, ids, mask, ignore_ids=[0])
    assert without_first.tolist() == [[0.0, 0.0, 0.0, 2.5]]

    def residual(pooled: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return literal_residual(pooled, weight, ids, mask)

    assert torch.autograd.gradcheck(residual, (pooled, weight))


def test_residual_of_random_operands_is_the_missing_importance_of_literal_terms() -> None:
    torch.manual_seed(0)
    pooled = torch.randn(3, 8, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(50, 8, dtype=torch.float64, requires_grad=True)
    ids = torch.randint(0, 50, (3, 7))
    mask = torch.tensor([[1] * 7, [0, 0, 1, 1, 1, 1, 1], [0] * 7])
    importance = pooled @ weight.T
    literal = torch.zeros(3, 50, dtype=torch.float64)
    for row in range(3):
        literal[row, ids[row][mask[row] == 1]] = 1
    expected = literal * (importance.amax(1, keepdim=True) - importance)
    same(literal_residual(pooled, weight, ids, mask), expected, [pooled, weight])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_residual_on_a_gpu_over_more_rows_than_uint16_counts(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    vocab_size = 70_001
    pooled = torch.randn(3, 64, device="cuda").to(dtype).requires_grad_()
    weight = torch.randn(vocab_size, 64, device="cuda").to(dtype).requires_grad_()
    ids = torch.randint(0, vocab_size, (3, 9), device="cuda")
    mask = torch.tensor([[1] * 9, [0, 0, *[1] * 7], [0] * 9], device="cuda")
    leaves = [pooled, weight]
    exact_leaves = [leaf.detach().cpu().double().requires_grad_() for leaf in leaves]
    expected = literal_residual(*exact_leaves, ids.cpu(), mask.cpu(), impl="reference")
    residual = literal_residual(pooled, weight, ids, mask)
    assert residual.dtype == torch.float32
    torch.testing.assert_close(residual.cpu().double(), expected, rtol=1e-5, atol=1e-4)
    residual.sum().backward()
    expected.sum().backward()
    budget = 1e-4 if dtype == torch.float32 else 2e-2
    for leaf, exact in zip(leaves, exact_leaves, strict=True):
        error = (leaf.grad.cpu().double() - exact.grad).norm()
        assert error <= budget * exact.grad.norm()


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["causal", "masked"])
def test_on_a_gpu_under_autocast_it_trains_and_agrees_with_the_cpu(
    bases: dict[str, Path],
    kind: str,
) -> None:
    expected = dense(two_sides(prosper(bases[kind], kind)), TEXTS, "document")
    model = two_sides(prosper(bases[kind], kind)).cuda()
    with accelerate(model):
        torch.testing.assert_close(
            dense(model, TEXTS, "document").cpu(),
            expected,
            rtol=0,
            atol=1e-4,
        )
        features: dict[str, Any] = {}
        for name, value in model.preprocess(TEXTS).items():
            features[name] = value.cuda() if hasattr(value, "cuda") else value
        with torch.autocast("cuda", torch.bfloat16):
            out = model(features, task="document")
        (out["sentence_embedding"].sum() + out["base_embedding"].sum()).backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())


def last_row(rows: torch.Tensor) -> torch.Tensor:
    return rows[-1]


def first_row(rows: torch.Tensor) -> torch.Tensor:
    return rows[0]


def largest_entries(rows: torch.Tensor) -> torch.Tensor:
    return rows.amax(0)


def head_inputs(transformer: ProsperTransformer, features: dict[str, Any]) -> torch.Tensor:
    """``[B, S, D]`` states that the transformer's head receives."""
    states: list[torch.Tensor] = []
    head: Any = transformer.model.get_output_embeddings()

    def record(hidden: torch.Tensor) -> torch.Tensor:
        states.append(hidden)
        return hidden

    head.forward = record
    transformer.model(
        input_ids=features["input_ids"],
        attention_mask=features["attention_mask"],
    )
    del head.forward
    return states[0]


@pytest.mark.parametrize(
    ("pooling", "pool"),
    [
        pytest.param("last", last_row, id="last"),
        pytest.param("cls", first_row, id="cls"),
        pytest.param("max", largest_entries, id="max"),
    ],
)
@pytest.mark.parametrize("kind", ["causal", "masked"])
def test_vectors_follow_the_formula(
    bases: dict[str, Path],
    kind: str,
    pooling: str,
    pool: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    transformer = prosper(bases[kind], kind, pooling=pooling, logit_scale=0.5).double().eval()
    head: Any = transformer.model.get_output_embeddings()
    bias = 0 if head.bias is None else head.bias
    features = transformer.preprocess(TEXTS)
    out = transformer(features)
    for row, hidden in enumerate(head_inputs(transformer, features)):
        valid = features["attention_mask"][row] == 1
        states = hidden[valid]
        logits = 0.5 * (states @ head.weight.T + bias)
        base = pool(logits.relu().log1p())
        importance = transformer.literal.weight @ pool(states.relu().log1p())
        literal = torch.zeros_like(base)
        literal[features["input_ids"][row][valid]] = 1
        literal[transformer.tokenizer.all_special_ids] = 0
        expected = base + literal * (importance.max() - importance)
        torch.testing.assert_close(out["base_embedding"][row], base, rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(out["sentence_embedding"][row], expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    ("pooling", "expected"),
    [
        pytest.param("last", [2, 0, 0], id="last"),
        pytest.param("cls", [1, 0, 0], id="cls"),
        pytest.param("max", [2, 0, 0], id="max"),
    ],
)
def test_pooling_reads_unmasked_states_only(pooling: str, expected: list[int]) -> None:
    hidden = torch.tensor([[[1.0], [2.0], [3.0]], [[4.0], [-1.0], [0.0]], [[5.0], [5.0], [5.0]]])
    mask = torch.tensor([[1, 1, 0], [0, 1, 0], [0, 0, 0]])
    pooled = pool_logits(hidden, mask != 0, pooling, "log1p_relu")
    assert pooled.expm1().flatten().round().tolist() == expected


ROWS = torch.tensor(
    [[3.0, 0.0, 1.0, 2.0], [0.0, 5.0, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0]],
    dtype=torch.float64,
)


def test_keep_heaviest_cuts_rows_that_have_more_terms() -> None:
    assert keep_heaviest(ROWS, 2).tolist() == [[3, 0, 0, 2], [0, 5, 0, 0], [0, 0, 0, 0]]
    assert keep_heaviest(ROWS, 4) is ROWS


def test_a_window_normalises_the_heaviest_terms_and_leaves_its_input() -> None:
    features = {"sentence_embedding": ROWS}
    out = LexicalWindow(2, "l2")(features)["sentence_embedding"]
    assert features["sentence_embedding"] is ROWS
    torch.testing.assert_close(out[0], ROWS.new_tensor([3, 0, 0, 2]) / 13**0.5)
    assert out[1].tolist() == [0, 1, 0, 0]
    assert not out[2].any()


def test_a_window_has_the_gradient_of_finite_differences() -> None:
    torch.manual_seed(0)
    rows = torch.rand(3, 6, dtype=torch.float64, requires_grad=True)
    window = LexicalWindow(3, "l2")

    def windowed(rows: torch.Tensor) -> torch.Tensor:
        return window({"sentence_embedding": rows})["sentence_embedding"]

    assert torch.autograd.gradcheck(windowed, (rows,))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        pytest.param({"top_k": 0}, "top_k must be", id="no terms"),
        pytest.param({"normalize": "l1"}, "normalize must be", id="unknown norm"),
    ],
)
def test_a_window_refuses_wrong_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LexicalWindow(**options)


@pytest.mark.parametrize("kind", ["causal", "masked"])
def test_both_windows_apply_accelerated_and_streamed_too(bases: dict[str, Path], kind: str) -> None:
    model = two_sides(prosper(bases[kind], kind))
    queries = dense(model, TEXTS, "query")
    documents = dense(model, TEXTS, "document")
    torch.testing.assert_close(queries.norm(dim=1), torch.ones(4))
    assert queries.count_nonzero(1).max() <= 8
    assert 8 < documents.count_nonzero(1).max() <= 16
    streamed = encode_sparse(model, TEXTS, task="document").to_dense()
    torch.testing.assert_close(streamed, documents, rtol=0, atol=1e-6)
    with accelerate(model):
        accelerated = dense(model, TEXTS, "document")
    torch.testing.assert_close(accelerated, documents, rtol=0, atol=1e-6)


@pytest.mark.parametrize("kind", ["causal", "masked"])
def test_a_prosper_transformer_stays_padded_also_without_a_check(
    bases: dict[str, Path],
    kind: str,
) -> None:
    model = two_sides(prosper(bases[kind], kind))
    expected = dense(model, TEXTS, "document")
    with accelerate(model, check=False) as accelerated:
        rows = dense(accelerated, TEXTS, "document")
    torch.testing.assert_close(rows, expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("kind", ["causal", "masked"])
def test_two_sides_share_a_transformer_after_reloading(
    bases: dict[str, Path],
    kind: str,
    tmp_path: Path,
) -> None:
    model = two_sides(prosper(bases[kind], kind))
    model.save_pretrained(str(tmp_path))
    reloaded = SparseEncoder(str(tmp_path), device="cpu", trust_remote_code=True)
    assert torch.equal(dense(reloaded, TEXTS, "query"), dense(model, TEXTS, "query"))
    routes: Any = reloaded[0].sub_modules
    assert routes["query"][0] is routes["document"][0]
    with accelerate(reloaded):
        accelerated = dense(reloaded, TEXTS, "document")
    torch.testing.assert_close(accelerated, dense(model, TEXTS, "document"), rtol=0, atol=1e-6)


@pytest.mark.parametrize("kind", ["causal", "masked"])
def test_a_folder_without_the_literal_weights_is_refused(
    bases: dict[str, Path],
    kind: str,
    tmp_path: Path,
) -> None:
    two_sides(prosper(bases[kind], kind)).save_pretrained(str(tmp_path))
    next(tmp_path.rglob(LITERAL_WEIGHTS)).unlink()
    with pytest.raises(
        FileNotFoundError,
        match="without which the literal residual would be random",
    ):
        SparseEncoder(str(tmp_path), device="cpu", trust_remote_code=True)


def base_splade_loss(model: Any, ranking: Any) -> BaseSpladeLoss:
    """The ranking loss with FLOPS penalties of weight 0.5 (documents) and 2 (queries)."""
    return BaseSpladeLoss(
        model,
        ranking,
        document_regularizer_weight=0.5,
        query_regularizer_weight=2.0,
        document_regularizer=GlobalFlopsLoss(),
        query_regularizer=GlobalFlopsLoss(),
    )


def test_penalties_are_of_base_weights_and_train_the_whole_model(bases: dict[str, Path]) -> None:
    transformer = prosper(bases["masked"], "masked").eval()
    model = SparseEncoder(modules=[transformer, LexicalWindow(normalize="l2")], device="cpu")
    loss = base_splade_loss(model, SparseMultipleNegativesRankingLoss(model))
    columns: list[dict[str, Any]] = []
    base_embeddings = []
    for task in ("query", "document", "document"):
        features = model.preprocess(TEXTS, task=task)
        columns.append({**features, "task": task})
        inputs = {name: value for name, value in features.items() if name != "task"}
        base_embeddings.append(transformer(inputs)["base_embedding"])
    parts = loss(columns)
    query_flops = base_embeddings[0].mean(0).square().sum()
    document_flops = torch.cat(base_embeddings[1:]).mean(0).square().sum()
    torch.testing.assert_close(parts["query_regularizer_loss"], 2 * query_flops)
    torch.testing.assert_close(parts["document_regularizer_loss"], 0.5 * document_flops)
    sum(parts.values()).backward()
    assert transformer.literal.weight.grad.abs().sum() > 0
    assert transformer.model.get_output_embeddings().weight.grad.abs().sum() > 0


def test_penalties_need_base_weights(bases: dict[str, Path]) -> None:
    transformer = prosper(bases["masked"], "masked").eval()
    model = SparseEncoder(modules=[transformer, LexicalWindow(normalize="l2")], device="cpu")
    columns = [
        {**model.preprocess(TEXTS, task=task), "task": task} for task in ("query", "document")
    ]
    ranking = SparseMultipleNegativesRankingLoss(model)
    loss = base_splade_loss(lambda features: {"sentence_embedding": 0}, ranking)
    with pytest.raises(ValueError, match="model must return base_embedding"):
        loss(columns)


def test_without_the_residual_weights_are_base_weights(bases: dict[str, Path]) -> None:
    transformer = prosper(bases["causal"], "causal", literal_residual=False).eval()
    out = transformer(transformer.preprocess(TEXTS))
    assert transformer.literal is None
    assert out["sentence_embedding"] is out["base_embedding"]


def test_an_unknown_pooling_and_a_model_without_an_lm_head_are_refused(
    bases: dict[str, Path],
) -> None:
    with pytest.raises(ValueError, match="pooling must be one of last, cls, max, got 'sum'"):
        prosper(bases["causal"], "causal", pooling="sum")
    with pytest.raises(ValueError, match=r"model must have an LM head that is a torch\.nn\.Linear"):
        ProsperTransformer(str(bases["masked"]))


# Echo inputs: every text twice, the second copy pooled


class EchoedTokens(NamedTuple):
    """Token ids of an echoed text.

    Attributes:
        all: All valid ids of the row.
        first_copy: Ids of the first copy of the text.
        second_copy: Ids that are pooled.
    """

    all: list[int]
    first_copy: list[int]
    second_copy: list[int]


def echoed_tokens(echo: Any, features: dict[str, Any], row: int) -> EchoedTokens:
    """Split a row of a document into its parts."""
    ids = features["input_ids"][row]
    valid = ids[features["attention_mask"][row] == 1].tolist()
    second_copy = ids[features["pooling_mask"][row] == 1].tolist()
    start = len(echo._token_ids("Document:"))
    return EchoedTokens(valid, valid[start : start + len(second_copy)], second_copy)


def causal_echo(base: Path, **options: Any) -> Any:
    """The echo transformer of a causal model."""
    return causal_splade(base, "echo", device="cpu", **options)[0]


@pytest.mark.parametrize("side", ["left", "right"])
def test_both_copies_are_equal_whatever_the_length(bases: dict[str, Path], side: str) -> None:
    echo = causal_echo(bases["causal"], max_length=48)
    echo.tokenizer.padding_side = side
    long_text = " ".join(TEXTS * 5)
    texts = [*TEXTS, long_text, ""]
    features = echo.preprocess(texts)
    assert features["input_ids"].shape == features["pooling_mask"].shape
    assert features["input_ids"].size(1) <= 48
    start = echo._token_ids("Document:")
    middle = echo._token_ids("\nDocument again:")
    end = [echo.tokenizer.eos_token_id]
    for row, text in enumerate(texts):
        tokens = echoed_tokens(echo, features, row)
        assert tokens.first_copy == tokens.second_copy
        assert tokens.second_copy == echo._token_ids(text)[: len(tokens.second_copy)]
        assert tokens.all == start + tokens.second_copy + middle + tokens.second_copy + end
    most_tokens = (48 - len(start) - len(middle) - len(end)) // 2
    assert int(features["pooling_mask"][texts.index(long_text)].sum()) == most_tokens
    padded_end = 0 if side == "left" else -1
    assert features["attention_mask"][2][padded_end] == 0


def test_the_vector_is_pooled_from_the_second_copy(bases: dict[str, Path]) -> None:
    model = causal_splade(bases["causal"], "echo", max_length=64, device="cpu")
    echo: Any = model[0]
    start = echo._token_ids("Query:")
    text = echo._token_ids(TEXTS[0])
    middle = echo._token_ids("\nQuery again:")
    ids = [*start, *text, *middle, *text, echo.tokenizer.eos_token_id]
    with torch.no_grad():
        logits = echo.model(input_ids=torch.tensor([ids])).logits[0]
    second_copy = len(start) + len(text) + len(middle)
    expected = logits[second_copy : second_copy + len(text)].amax(0).relu().log1p()
    torch.testing.assert_close(dense(model, TEXTS[:1], "query")[0], expected, rtol=0, atol=1e-6)


def test_echoed_vectors_do_not_depend_on_the_padding_side(bases: dict[str, Path]) -> None:
    model = causal_splade(bases["causal"], "echo", max_length=64, device="cpu")
    expected = dense(model, TEXTS)
    model.tokenizer.padding_side = "right"
    torch.testing.assert_close(dense(model, TEXTS), expected, rtol=0, atol=1e-6)


def test_a_prompt_precedes_the_template_once(bases: dict[str, Path]) -> None:
    echo = causal_echo(bases["causal"], max_length=64)
    features = echo.preprocess(["fox"], prompt="Find {text}. ")
    tokens = echoed_tokens(echo, features, row=0)
    start = echo._token_ids("Find {text}. Document:")
    assert tokens.all[: len(start)] == start
    assert tokens.second_copy == echo._token_ids("fox")


def test_templates_are_saved_with_the_module(bases: dict[str, Path], tmp_path: Path) -> None:
    template = "{text} | {text}"
    echo = causal_echo(bases["causal"], query_template=template)
    echo.save(str(tmp_path))
    reloaded = EchoTransformer.load(str(tmp_path), local_files_only=True)
    assert reloaded.query_template == template
    assert reloaded.document_template == echo.document_template


def test_a_forward_pass_leaves_its_features_unchanged(bases: dict[str, Path]) -> None:
    echo = causal_echo(bases["causal"], query_template="{text} | {text}")
    features = echo.preprocess(TEXTS, task="query")
    copies = {
        name: value.clone() for name, value in features.items() if isinstance(value, torch.Tensor)
    }
    assert torch.equal(echo(features)["attention_mask"], copies["pooling_mask"])
    assert all(torch.equal(features[name], value) for name, value in copies.items())


def test_a_template_must_hold_the_text_twice(bases: dict[str, Path]) -> None:
    with pytest.raises(
        ValueError,
        match=r"query_template must hold \{text\} twice, got '\{text\}'",
    ):
        causal_splade(bases["causal"], "echo", query_template="{text}")


def test_inputs_that_cannot_be_echoed_are_refused(bases: dict[str, Path]) -> None:
    echo = causal_echo(bases["causal"], max_length=12)
    with pytest.raises(ValueError, match="max_seq_length must leave room for two copies"):
        echo.preprocess(TEXTS)
    with pytest.raises(TypeError, match="inputs must be texts, got dict"):
        echo.preprocess([{"text": "x"}])
    with pytest.raises(ValueError, match="features must hold pooling_mask"):
        echo({"input_ids": torch.tensor([[1]])})
