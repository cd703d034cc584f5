"""Stock encoders compute the same of packed tokens as of padded ones, forward and backward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim.swa_utils import AveragedModel

from tests import programs
from tests.recipes.small import tiny_network
from tests.refusals import refused
from tilefold.integrations import transformers
from tilefold.integrations.transformers.packed import (
    PACKED,
    packed_hidden_states,
    position_ids_of,
    stop_packed,
    use_packed,
)

KINDS = ["bert", "roberta", "xlm-roberta", "distilbert", "modernbert", "albert"]
CASES = [
    (kind, again) for kind in KINDS for again in (False, True) if (kind, again) != ("albert", True)
]
LENGTHS = [7, 1, 30, 12]


def network(kind: str, **options: Any) -> Any:
    if kind == "modernbert":  # a window that the longest sequence exceeds, and both kinds of layers
        options = {"local_attention": 8, "global_attn_every_n_layers": 2, **options}
    return tiny_network(kind, vocab_size=300, **options).double()


def batch(device: str = "cpu") -> tuple[Tensor, Tensor, Tensor]:
    """Padded ids, their mask, and the offsets of the sequences."""
    lengths = torch.tensor(LENGTHS, device=device)
    mask = (torch.arange(max(LENGTHS), device=device) < lengths[:, None]).long()
    ids = (
        torch.randint(5, 300, mask.shape, generator=torch.Generator().manual_seed(1)).to(device)
        * mask
    )
    return ids, mask, torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]).to(torch.int32)


def gradients(model: Any, out: Tensor) -> dict[str, Tensor]:
    weights = torch.randn(
        out.shape,
        generator=torch.Generator().manual_seed(2),
        dtype=torch.float64,
    )
    model.zero_grad(set_to_none=True)
    (out * weights.to(out)).sum().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize(("kind", "checkpointing"), CASES)
def test_packed_is_padded_without_padding(kind: str, checkpointing: bool) -> None:
    model = network(kind).eval()
    ids, mask, offsets = batch()
    kept = mask.bool()
    expected = model(input_ids=ids, attention_mask=mask).logits[kept]
    right = gradients(model, expected)
    assert use_packed(model) is None
    if checkpointing:
        model.train()
        for (
            module
        ) in model.modules():  # train mode turns checkpointing on; dropout has a test of its own
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.0
        model.gradient_checkpointing_enable({"use_reentrant": False})
    got = packed_hidden_states(model, ids[kept], offsets, max(LENGTHS))
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-11)
    found = gradients(model, got)
    assert found.keys() == right.keys()
    for name, gradient in right.items():
        torch.testing.assert_close(found[name], gradient, rtol=0, atol=1e-10, msg=name)


@pytest.mark.parametrize("kind", ["bert", "modernbert"])
def test_padded_inputs_run_as_before(kind: str) -> None:
    model = network(kind).eval()
    ids, mask, _ = batch()
    with torch.no_grad():
        expected = [
            model(input_ids=ids, attention_mask=mask).logits,
            model(input_ids=ids[2:3]).logits,
        ]
        assert use_packed(model) is None and model.config._attn_implementation == PACKED
        assert torch.equal(model(input_ids=ids, attention_mask=mask).logits, expected[0])
        torch.testing.assert_close(
            model(input_ids=ids[2:3]).logits,
            expected[1],
            rtol=0,
            atol=1e-12,
        )
    stop_packed(model)
    assert model.config._attn_implementation == "sdpa"


def test_positions_are_those_of_the_padded_model() -> None:
    from transformers.models.roberta.modeling_roberta import RobertaEmbeddings

    ids, mask, offsets = batch()
    ids[2, 4] = 1  # the text itself has the token of padding
    ids = torch.where(mask.bool(), ids, 1)
    expected = RobertaEmbeddings.create_position_ids_from_input_ids(ids, 1)[mask.bool()]
    assert torch.equal(position_ids_of(ids[mask.bool()], offsets, 1), expected)
    assert torch.equal(
        position_ids_of(ids[mask.bool()], offsets),
        torch.cat([torch.arange(n) for n in LENGTHS]),
    )


def test_token_types_reach_the_model_and_masks_with_packed_sequences_are_refused() -> None:
    model = network("bert").eval()
    ids, mask, offsets = batch()
    types = (torch.arange(ids.size(1)) > 4).long().expand_as(ids).contiguous()
    assert use_packed(model) is None
    with torch.no_grad():
        expected = model(input_ids=ids, attention_mask=mask, token_type_ids=types).logits[
            mask.bool()
        ]
        got = packed_hidden_states(
            model,
            ids[mask.bool()],
            offsets,
            max(LENGTHS),
            token_type_ids=types[mask.bool()],
        )
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-11)
    with pytest.raises(ValueError, match=r"packed sequences must be one row \[1, T\]"):
        model(
            input_ids=ids,
            cu_seq_lens_q=offsets,
            cu_seq_lens_k=offsets,
            max_length_q=30,
            max_length_k=30,
        )


def test_what_stays_padded_says_why_and_is_not_changed() -> None:
    eager, mixing = network("bert", attn_implementation="eager"), network("bert")
    mixing.bert.embeddings.register_forward_hook(lambda _, __, out: out + out.mean(1, keepdim=True))
    for model, why in (
        (network("mpnet"), "does not go through transformers' AttentionInterface"),
        (network("bert", is_decoder=True), "is no encoder"),
        (eager, "attn_implementation='eager' was chosen"),
        (mixing, "disagree by"),
        (AveragedModel(torch.nn.Linear(2, 2)), "is no transformers model"),
    ):
        assert why in str(use_packed(model))
    assert (eager.config._attn_implementation, mixing.config._attn_implementation) == (
        "eager",
        "sdpa",
    )


def test_entmax_attention_takes_packed_tokens_itself() -> None:
    from tilefold.integrations.transformers import register

    register()
    model = network("bert", attn_implementation="entmax").float().eval()
    ids, mask, offsets = batch()
    with torch.no_grad():
        expected = model(input_ids=ids, attention_mask=mask).logits[mask.bool()]
        assert use_packed(model) is None and model.config._attn_implementation == "entmax"
        got = packed_hidden_states(model, ids[mask.bool()], offsets, max(LENGTHS))
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-5)


def test_nothing_is_registered_by_an_import() -> None:
    code = "import tilefold.integrations.transformers, transformers as t; print(*t.AttentionInterface._global_mapping)"
    done = programs.run("-c", code)
    assert (
        done.returncode == 0 and "sdpa" in done.stdout and "tilefold_packed" not in done.stdout
    ), done.stderr


@pytest.mark.filterwarnings("ignore:Synchronization debug mode:UserWarning")
@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("kind", ["bert", "roberta", "distilbert", "modernbert"])
def test_packed_is_padded_on_a_gpu(kind: str, dtype: torch.dtype) -> None:
    model = network(kind).eval().to("cuda", dtype)
    ids, mask, offsets = batch("cuda")
    kept = mask.bool()
    expected = model(input_ids=ids, attention_mask=mask).logits[kept]
    right = gradients(model, expected)
    assert use_packed(model) is None
    packed = ids[kept]
    torch.cuda.synchronize()
    try:
        torch.cuda.set_sync_debug_mode("error")  # nothing waits for the GPU
        got = packed_hidden_states(model, packed, offsets, max(LENGTHS))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    budget = 0.03 if dtype == torch.bfloat16 else 1e-3
    found = {"scores": got.detach(), **gradients(model, got)}
    for name, exact in {"scores": expected.detach(), **right}.items():
        assert (
            float((found[name] - exact).abs().max()) <= budget * float(exact.abs().max()) + 1e-6
        ), name


@pytest.mark.parametrize(
    "call",
    [
        pytest.param(use_packed, id="use_packed"),
        pytest.param(stop_packed, id="stop_packed"),
        pytest.param(transformers.use_entmax, id="use_entmax"),
        pytest.param(transformers.use_softmax, id="use_softmax"),
        pytest.param(transformers.runs_entmax, id="runs_entmax"),
        pytest.param(transformers.learn_alpha, id="learn_alpha"),
        pytest.param(lambda model: transformers.set_alpha(model, 1.5), id="set_alpha"),
        pytest.param(lambda model: transformers.load_alpha(model, "checkpoint"), id="load_alpha"),
        pytest.param(
            lambda model: transformers.record_sparsity(model).__enter__(),
            id="record_sparsity",
        ),
    ],
)
def test_the_name_of_a_model_is_refused_by_the_arguments_name(call: Any) -> None:
    refused(TypeError, "model: expected Module, got 'minilm'", call, "minilm")
