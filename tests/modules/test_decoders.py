"""PROSPER (literal residual, window, norm, penalty on base weights) and echo inputs, over small
decoders.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from sentence_transformers import SparseEncoder
from sentence_transformers.base.modules import Router
from sentence_transformers.sparse_encoder.losses import SparseMultipleNegativesRankingLoss

from tests.integrations.splade_models import CAUSAL_OPTIONS
from tests.modules.batches import same
from tests.recipes.small import TEXTS, causal_splade, dense, small_masked_lm, tiny_causal_lm
from tests.refusals import refused
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
    folder = tmp_path_factory.mktemp("bases")
    return {
        "causal": tiny_causal_lm(folder / "causal"),
        "masked": small_masked_lm(folder / "masked"),
    }


def prosper(base: Path, kind: str, **options: Any) -> ProsperTransformer:
    torch.manual_seed(3)
    return ProsperTransformer(str(base), **KINDS[kind], **options)


def two_sides(transformer: ProsperTransformer) -> SparseEncoder:
    query, document = LexicalWindow(8, "l2"), LexicalWindow(16)
    return SparseEncoder(
        modules=[Router.for_query_document([transformer, query], [transformer, document])],
        device="cpu",
    )


def test_residual_by_hand_and_as_defined_on_random_operands() -> None:
    pooled = torch.tensor([[1.0, 2.0]], dtype=torch.float64, requires_grad=True)
    weight = torch.tensor(
        [[1.0, 0.0], [0.0, 2.0], [3.0, -1.0], [0.5, 0.5]],
        dtype=torch.float64,
        requires_grad=True,
    )
    ids, mask = torch.tensor([[3, 0, 3, 1, 2]]), torch.tensor([[1, 1, 1, 1, 0]])
    # w' = [1, 4, 1, 1.5], max 4; literal terms 0, 1, 3, and 2 is masked
    assert literal_residual(pooled, weight, ids, mask).tolist() == [[3.0, 0.0, 0.0, 2.5]]
    assert literal_residual(pooled, weight, ids, mask, ignore_ids=[0]).tolist() == [
        [0.0, 0.0, 0.0, 2.5],
    ]
    assert torch.autograd.gradcheck(
        lambda p, w: literal_residual(p, w, ids, mask),
        (pooled, weight),
    )
    torch.manual_seed(0)
    pooled, weight = (torch.randn(n, 8, dtype=torch.float64, requires_grad=True) for n in (3, 50))
    ids, mask = (
        torch.randint(0, 50, (3, 7)),
        torch.tensor([[1] * 7, [0, 0, 1, 1, 1, 1, 1], [0] * 7]),
    )
    own, literal = pooled @ weight.T, torch.zeros(3, 50, dtype=torch.float64)
    for row, (tokens, keep) in enumerate(zip(ids, mask, strict=True)):
        literal[row, tokens[keep == 1]] = 1
    same(
        literal_residual(pooled, weight, ids, mask),
        literal * (own.amax(1, keepdim=True) - own),
        [pooled, weight],
    )


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_residual_on_a_gpu_over_more_rows_than_uint16_counts(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    pooled, weight = (
        torch.randn(n, 64, device="cuda").to(dtype).requires_grad_() for n in (3, 70_001)
    )
    ids = torch.randint(0, 70_001, (3, 9), device="cuda")
    mask = torch.tensor([[1] * 9, [0, 0, *[1] * 7], [0] * 9], device="cuda")
    wide = [x.detach().cpu().double().requires_grad_() for x in (pooled, weight)]
    expected = literal_residual(*wide, ids.cpu(), mask.cpu(), impl="reference")
    got = literal_residual(pooled, weight, ids, mask)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got.cpu().double(), expected, rtol=1e-5, atol=1e-4)
    got.sum().backward()
    expected.sum().backward()
    budget = 1e-4 if dtype == torch.float32 else 2e-2
    for mine, exact in zip((pooled, weight), wide, strict=True):
        assert (mine.grad.cpu().double() - exact.grad).norm() <= budget * exact.grad.norm()


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
        given = model.preprocess(TEXTS).items()
        features = {
            name: value.cuda() if hasattr(value, "cuda") else value for name, value in given
        }
        with torch.autocast("cuda", torch.bfloat16):
            out = model(features, task="document")
        (out["sentence_embedding"].sum() + out["base_embedding"].sum()).backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("pooling", ["last", "cls", "max"])
@pytest.mark.parametrize("kind", ["causal", "masked"])
def test_vectors_follow_the_formula(bases: dict[str, Path], kind: str, pooling: str) -> None:
    transformer = prosper(bases[kind], kind, pooling=pooling, logit_scale=0.5).double().eval()
    features = transformer.preprocess(TEXTS)
    out = transformer(features)
    head: Any = transformer.model.get_output_embeddings()
    captured: Any = []
    head.forward = lambda x: captured.append(x) or x
    transformer.model(**{name: features[name] for name in ("input_ids", "attention_mask")})
    del head.forward
    for row, hidden in enumerate(captured[0]):
        states = hidden[features["attention_mask"][row] == 1]
        logits = 0.5 * (states @ head.weight.T + (0 if head.bias is None else head.bias))
        pick = {"last": lambda x: x[-1], "cls": lambda x: x[0], "max": lambda x: x.amax(0)}[pooling]
        base = pick(logits.relu().log1p())
        importance = transformer.literal.weight @ pick(states.relu().log1p())
        literal = torch.zeros_like(base)
        literal[features["input_ids"][row][features["attention_mask"][row] == 1]] = 1
        literal[transformer.tokenizer.all_special_ids] = 0
        expected = base + literal * (importance.max() - importance)
        torch.testing.assert_close(out["base_embedding"][row], base, rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(out["sentence_embedding"][row], expected, rtol=1e-9, atol=1e-12)


def test_pooled_states_of_any_mask() -> None:
    hidden = torch.tensor([[[1.0], [2.0], [3.0]], [[4.0], [-1.0], [0.0]], [[5.0], [5.0], [5.0]]])
    mask = torch.tensor([[1, 1, 0], [0, 1, 0], [0, 0, 0]])
    for name, expected in (("last", [2, 0, 0]), ("cls", [1, 0, 0]), ("max", [2, 0, 0])):
        assert (
            pool_logits(hidden, mask != 0, name, "log1p_relu").expm1().flatten().round().tolist()
            == expected
        )


def test_window_keeps_the_heaviest_of_rows_that_have_more_and_their_gradient() -> None:
    rows = torch.tensor(
        [[3.0, 0.0, 1.0, 2.0], [0.0, 5.0, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0]],
        dtype=torch.float64,
    )
    assert keep_heaviest(rows, 2).tolist() == [[3, 0, 0, 2], [0, 5, 0, 0], [0, 0, 0, 0]]
    assert keep_heaviest(rows, 4) is rows
    features = {"sentence_embedding": rows}
    out = LexicalWindow(2, "l2")(features)["sentence_embedding"]
    assert features["sentence_embedding"] is rows
    torch.testing.assert_close(out[0], rows.new_tensor([3, 0, 0, 2]) / 13**0.5)
    assert out[1].tolist() == [0, 1, 0, 0] and not out[2].any()
    torch.manual_seed(0)
    free = torch.rand(3, 6, dtype=torch.float64, requires_grad=True)
    window = LexicalWindow(3, "l2")
    assert torch.autograd.gradcheck(
        lambda x: window({"sentence_embedding": x})["sentence_embedding"],
        (free,),
    )
    for wrong in ({"top_k": 0}, {"normalize": "l1"}):
        refused(ValueError, f"{next(iter(wrong))} must be", LexicalWindow, **wrong)


@pytest.mark.parametrize("kind", ["causal", "masked"])
def test_two_sides_share_a_transformer_and_reload(
    bases: dict[str, Path],
    kind: str,
    tmp_path: Path,
) -> None:
    model = two_sides(prosper(bases[kind], kind))
    queries, documents = dense(model, TEXTS, "query"), dense(model, TEXTS, "document")
    torch.testing.assert_close(queries.norm(dim=1), torch.ones(4))
    assert queries.count_nonzero(1).max() <= 8 and 8 < documents.count_nonzero(1).max() <= 16
    model.save_pretrained(str(tmp_path))
    again = SparseEncoder(str(tmp_path), device="cpu", trust_remote_code=True)
    assert torch.equal(dense(again, TEXTS, "query"), queries)
    routes: Any = again[0].sub_modules
    assert routes["query"][0] is routes["document"][0]
    with accelerate(again):
        torch.testing.assert_close(dense(again, TEXTS, "document"), documents, rtol=0, atol=1e-6)
    torch.testing.assert_close(
        encode_sparse(model, TEXTS, task="document").to_dense(),
        documents,
        rtol=0,
        atol=1e-6,
    )
    next(tmp_path.rglob(LITERAL_WEIGHTS)).unlink()
    with pytest.raises(
        FileNotFoundError,
        match="without which the literal residual would be random",
    ):
        SparseEncoder(str(tmp_path), device="cpu", trust_remote_code=True)


def test_penalties_are_of_base_weights_and_train_the_whole_model(bases: dict[str, Path]) -> None:
    transformer = prosper(bases["masked"], "masked").eval()
    model = SparseEncoder(modules=[transformer, LexicalWindow(normalize="l2")], device="cpu")
    ranking = SparseMultipleNegativesRankingLoss(model)
    loss = BaseSpladeLoss(
        model,
        ranking,
        document_regularizer_weight=0.5,
        query_regularizer_weight=2.0,
        document_regularizer=GlobalFlopsLoss(),
        query_regularizer=GlobalFlopsLoss(),
    )
    columns = [
        {**model.preprocess(TEXTS, task=task), "task": task}
        for task in ("query", "document", "document")
    ]
    parts = loss(columns)
    base = [
        transformer({k: v for k, v in column.items() if k != "task"})["base_embedding"]
        for column in columns
    ]
    torch.testing.assert_close(parts["query_regularizer_loss"], 2 * base[0].mean(0).square().sum())
    torch.testing.assert_close(
        parts["document_regularizer_loss"],
        0.5 * torch.cat(base[1:]).mean(0).square().sum(),
    )
    sum(parts.values()).backward()
    assert transformer.literal.weight.grad.abs().sum() > 0
    assert transformer.model.get_output_embeddings().weight.grad.abs().sum() > 0
    with pytest.raises(ValueError, match="model must give base_embedding"):
        BaseSpladeLoss(lambda _: {"sentence_embedding": 0}, ranking, 1.0, 1.0)(columns)


def test_without_the_residual_weights_are_base_weights_and_others_are_refused(
    bases: dict[str, Path],
) -> None:
    transformer = prosper(bases["causal"], "causal", literal_residual=False).eval()
    out = transformer(transformer.preprocess(TEXTS))
    assert transformer.literal is None and out["sentence_embedding"] is out["base_embedding"]
    with pytest.raises(ValueError, match="pooling must be one of last, cls, max, got 'sum'"):
        prosper(bases["causal"], "causal", pooling="sum")
    with pytest.raises(ValueError, match=r"model must have an LM head that is a torch\.nn\.Linear"):
        ProsperTransformer(str(bases["masked"]))


# Echo inputs: every text twice, the second copy pooled


def copies(echo: Any, features: dict[str, Any], row: int) -> tuple[list[int], list[int], list[int]]:
    """All valid tokens of a row, those that are pooled, and as many before the words between."""
    ids, mask, pooled = (
        features[name][row] for name in ("input_ids", "attention_mask", "pooling_mask")
    )
    tokens, second = ids[mask == 1].tolist(), ids[pooled == 1].tolist()
    before = len(echo._ids("Document:"))
    return tokens, second, tokens[before : before + len(second)]


@pytest.mark.parametrize("side", ["left", "right"])
def test_both_copies_are_equal_whatever_the_length(bases: dict[str, Path], side: str) -> None:
    echo: Any = causal_splade(bases["causal"], "echo", max_length=48, device="cpu")[0]
    echo.tokenizer.padding_side = side
    texts = [*TEXTS, " ".join(TEXTS * 5), ""]
    features = echo.preprocess(texts)
    assert (
        features["input_ids"].shape == features["pooling_mask"].shape
        and features["input_ids"].size(1) <= 48
    )
    for row, text in enumerate(texts):
        tokens, second, first = copies(echo, features, row)
        assert first == second == echo._ids(text)[: len(second)]
        assert tokens[-1] == echo.tokenizer.eos_token_id
        middle = echo._ids("\nDocument again:")
        assert tokens == [
            *echo._ids("Document:"),
            *second,
            *middle,
            *second,
            echo.tokenizer.eos_token_id,
        ]
    assert (
        int(features["pooling_mask"][4].sum())
        == (48 - len(echo._ids("Document:")) - len(middle) - 1) // 2
    )
    assert features["attention_mask"][2][0 if side == "left" else -1] == 0


def test_the_vector_is_that_of_the_second_copy_by_hand_with_padding_on_either_side(
    bases: dict[str, Path],
) -> None:
    model = causal_splade(bases["causal"], "echo", max_length=64, device="cpu")
    echo: Any = model[0]
    start, text, middle = (echo._ids(part) for part in ("Query:", TEXTS[0], "\nQuery again:"))
    ids = [*start, *text, *middle, *text, echo.tokenizer.eos_token_id]
    with torch.no_grad():
        logits = echo.model(input_ids=torch.tensor([ids])).logits[0]
    place = len(start) + len(text) + len(middle)
    expected = logits[place : place + len(text)].amax(0).relu().log1p()
    torch.testing.assert_close(dense(model, TEXTS[:1], "query")[0], expected, rtol=0, atol=1e-6)
    left = dense(model, TEXTS)
    model.tokenizer.padding_side = "right"
    torch.testing.assert_close(dense(model, TEXTS), left, rtol=0, atol=1e-6)


def test_a_prompt_stands_before_the_template_once(bases: dict[str, Path]) -> None:
    echo: Any = causal_splade(bases["causal"], "echo", max_length=64, device="cpu")[0]
    tokens, second, _ = copies(echo, echo.preprocess(["fox"], prompt="Find {text}. "), 0)
    assert tokens[: len(echo._ids("Find {text}. Document:"))] == echo._ids("Find {text}. Document:")
    assert second == echo._ids("fox")


def test_templates_travel_and_features_are_left_alone(
    bases: dict[str, Path],
    tmp_path: Path,
) -> None:
    template = "{text} | {text}"
    model = causal_splade(bases["causal"], "echo", query_template=template, device="cpu")
    echo: Any = model[0]
    echo.save(str(tmp_path))
    again = EchoTransformer.load(str(tmp_path), local_files_only=True)
    assert (again.query_template, again.document_template) == (template, echo.document_template)
    features = echo.preprocess(TEXTS, task="query")
    kept = {
        name: value.clone() for name, value in features.items() if isinstance(value, torch.Tensor)
    }
    assert torch.equal(echo(features)["attention_mask"], kept["pooling_mask"])
    assert all(torch.equal(features[name], value) for name, value in kept.items())


def test_what_cannot_be_echoed_is_refused(bases: dict[str, Path]) -> None:
    with pytest.raises(
        ValueError,
        match=r"query_template must hold \{text\} twice, got '\{text\}'",
    ):
        causal_splade(bases["causal"], "echo", query_template="{text}")
    echo: Any = causal_splade(bases["causal"], "echo", max_length=12, device="cpu")[0]
    refused(ValueError, "max_seq_length must leave room for two copies", echo.preprocess, TEXTS)
    refused(TypeError, "inputs must be texts, got dict", echo.preprocess, [{"text": "x"}])
    refused(ValueError, "features must hold pooling_mask", echo, {"input_ids": torch.tensor([[1]])})
