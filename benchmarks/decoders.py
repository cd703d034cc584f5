"""Time a SPLADE model on a decoder: encoding, and whole training steps, padded and packed.

    python -m benchmarks.decoders --shape llama-1b --shape llama-1b-lora
    python -m benchmarks.decoders --shape llama-1b-echo --shape llama-1b-cached

Timed: texts of 230 tokens to sparse rows, in memory and as Parquet, and steps of the stock trainer
with pairs of ragged documents, by the wall clock. Weights are random, in bf16, and drawn on the
device. The optimizer is SGD, so that a step is the forward and backward pass, not the traffic of an
optimizer's state. With LoRA, the weights of its updates are fp32, and the optimizer is AdamW. The
case ``cached`` trains 1,024 pairs per step in mini-batches with LoRA and recomputed layers.

Baseline: the stock model, and the accelerated one with ``packed=False``: a padded decoder with the
fused head. ``cached`` has no baseline, because the stock model needs minutes for a step.

Gate: hidden states and gradients of packed texts in bf16 are as near to those in fp32 as those of
padded texts, with padding on either side; and all ways of training begin with the same loss.
"""

from __future__ import annotations

import copy
import gc
import itertools
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.encode import seconds_of
from benchmarks.encode_data import ACTIVE_TERMS
from benchmarks.job import Job, JobCase, JobOptions, Row, main
from benchmarks.train_data import load_tokenizer, made_pairs, words_of
from benchmarks.train_run import GIB, make_loss

STOCK = "stock"
PADDED = "padded"
PACKED = "packed"
PARQUET = "packed, to Parquet"
GRAPHS = "CUDA graphs"
COMPILED = "compiled layers"
# tokens of a text that are read: in encoding, and of a document in training
MAX_TOKENS = 512
MAX_TRAINING_TOKENS = 256
# median of the lengths of encoded texts in tokens, and the standard deviation of their logarithm
MEDIAN_TOKENS = 215
TOKENS_DEVIATION = 0.37
FEWEST_TOKENS = 12
# texts per batch of the stock model
STOCK_BATCH = 32
# parts of the texts that slow ways encode
STOCK_PART = 5
PADDED_PART = 2
# timed calls of a fast way, after one that warms up
CALLS = 3
# lengths of the texts of the gate, in tokens
GATE_LENGTHS = (230, 1, 57, 400, 8)
# allowed error over that of padded texts, which are summed in another order
ERROR_FACTOR = 1.1
# allowed difference of first losses, as a fraction
LOSS_TOLERANCE = 2e-2
# steps of ways without graphs, and with them, of which the second half is timed
FEW_STEPS = 12
MANY_STEPS = 60
LEARNING_RATE = 1e-7
# value of the first hidden dimension, which stands for a bias of the head
CONSTANT = 24.0
# words of a sample that the tokens of a word are measured on
SAMPLED_WORDS = 2000

_LLAMA_1B = {
    "hidden": 2048,
    "layers": 16,
    "heads": 32,
    "key_heads": 8,
    "intermediate": 8192,
    "vocab": 128256,
    "texts": 2000,
    "pairs": (64, 32),
}
_TINY = {
    "hidden": 64,
    "layers": 2,
    "heads": 4,
    "key_heads": 2,
    "intermediate": 128,
    "vocab": 32000,
    "texts": 20,
    "pairs": (4,),
}
# Rank of LoRA, and mini-batches, of the recipe's trainings.
_LORA = {"lora": 64, "texts": 0}
_CACHED = {**_LORA, "pairs": (1024,), "mini_batch": 64, "checkpointing": True}
CASES = (
    JobCase("llama-1b", devices=("cuda",), numbers=_LLAMA_1B),
    JobCase("llama-1b-lora", devices=("cuda",), numbers={**_LLAMA_1B, **_LORA}),
    JobCase("llama-1b-echo", devices=("cuda",), numbers={**_LLAMA_1B, "echo": True}),
    JobCase("llama-1b-cached", devices=("cuda",), numbers={**_LLAMA_1B, **_CACHED}),
    JobCase("tiny", devices=(), numbers=_TINY),
    JobCase("tiny-lora", devices=(), numbers={**_TINY, "lora": 2, "texts": 0}),
    JobCase("tiny-echo", devices=(), numbers={**_TINY, "echo": True}),
    JobCase(
        "tiny-cached",
        devices=(),
        numbers={
            **_TINY,
            "lora": 2,
            "texts": 0,
            "pairs": (8,),
            "mini_batch": 2,
            "checkpointing": True,
        },
    ),
)


def make_decoder(case: JobCase, tokenizer: Any, device: torch.device) -> Any:
    """Make a SparseEncoder on a Llama of random weights that scores about 230 terms of a text.

    The head of a Llama has no bias. So the first hidden dimension has the same value for all
    tokens, and its column of the head is the negative level above which a term is active.

    Args:
        case: sizes of the decoder.
        tokenizer: the tokenizer, whose ids must be below the vocabulary.
        device: the device, on which the weights are drawn.

    Returns:
        The model, in bf16 on a GPU and in fp32 on a CPU.
    """
    from sentence_transformers import SparseEncoder
    from sentence_transformers.sparse_encoder.modules import SpladePooling
    from transformers import LlamaForCausalLM

    transformer = _small_transformer(tokenizer, echo=case.numbers.get("echo", False))
    torch.manual_seed(0)
    with torch.device(device):
        network = LlamaForCausalLM(_llama_config(case))
    network.to(torch.bfloat16 if device.type == "cuda" else torch.float32)
    with torch.no_grad():
        network.model.embed_tokens.weight[:, 0] = CONSTANT
        network.lm_head.weight[:, 0] = 0
        for layer in network.model.layers:
            layer.self_attn.o_proj.weight[0] = 0
            layer.mlp.down_proj.weight[0] = 0
    _choose_level(network, len(tokenizer), device)
    transformer.model = network
    model = SparseEncoder(modules=[transformer, SpladePooling("max")], device=str(device))
    model.model_card_data.local_files_only = True
    model.model_card_data.generate_widget_examples = False
    model.model_card_data.widget = [{"text": "a"}]
    return model


def train_with_lora(model: Any, rank: int) -> None:
    """Add LoRA updates in fp32 to a decoder, and freeze its other weights."""
    from tilefold.recipes._training import use_fp32_weights
    from tilefold.recipes.decoders import LORA_ALPHA_PER_RANK, add_lora

    # Losses are compared, so nothing is dropped.
    add_lora(model[0], rank=rank, alpha=LORA_ALPHA_PER_RANK * rank, dropout=0.0)
    use_fp32_weights(model, frozen=False)


def _llama_config(case: JobCase) -> Any:
    """Return the configuration of the decoder of a case."""
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=case.numbers["vocab"],
        hidden_size=case.numbers["hidden"],
        num_hidden_layers=case.numbers["layers"],
        num_attention_heads=case.numbers["heads"],
        num_key_value_heads=case.numbers["key_heads"],
        intermediate_size=case.numbers["intermediate"],
        max_position_embeddings=2048,
        tie_word_embeddings=False,
        use_cache=False,
        pad_token_id=0,
        bos_token_id=101,
        eos_token_id=102,
    )


def _small_transformer(tokenizer: Any, *, echo: bool) -> Any:
    """Return a Transformer of sentence-transformers with a small network, which is replaced later.

    Loading a network of a billion weights from a folder would take longer than the measurement.

    Args:
        tokenizer: the tokenizer.
        echo: whether the Transformer reads each text twice.
    """
    from sentence_transformers.base.modules import Transformer
    from transformers import LlamaConfig, LlamaForCausalLM

    from tilefold.modules.echo import EchoTransformer

    transformer_class = EchoTransformer if echo else Transformer

    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=64,
        pad_token_id=0,
    )
    with tempfile.TemporaryDirectory(prefix="tilefold-bench-") as folder:
        LlamaForCausalLM(config).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        return transformer_class(
            folder,
            transformer_task="text-generation",
            modality_config={"text": {"method": "forward", "method_output_name": "logits"}},
            module_output_name="token_embeddings",
            processing_kwargs={"text": {"logits_to_keep": 0}},
            model_kwargs={"local_files_only": True},
            processor_kwargs={"local_files_only": True},
        )


@torch.no_grad()
def _choose_level(network: Any, n_tokens: int, device: torch.device) -> None:
    """Set the bias of the head so that random texts have about 230 active terms.

    The head has no bias of its own. The first entry of the hidden states is a constant, so that the
    first column of the head is its bias.

    Args:
        network: the decoder, changed in place.
        n_tokens: the number of token ids that texts are drawn from.
        device: its device.
    """
    ids = torch.randint(n_tokens, (8, MEDIAN_TOKENS), device=device)
    hidden = network.model(input_ids=ids).last_hidden_state
    scores = network.lm_head(hidden).amax(1).float()  # [8, V]
    threshold = scores.flatten().topk(len(scores) * ACTIVE_TERMS).values[-1]
    network.lm_head.weight[:, 0] = -threshold / hidden[..., 0].float().mean()


def make_abstracts(tokenizer: Any, count: int) -> list[str]:
    """Make texts of random words, with about as many tokens as abstracts of articles.

    Args:
        tokenizer: its vocabulary has the words.
        count: the number of texts.
    """
    generator = np.random.default_rng(0)
    words = np.array(words_of(tokenizer))

    def random_text(n_words: int) -> str:
        """Return a number of random words."""
        return " ".join(words[generator.integers(len(words), size=n_words)])

    sample_ids = tokenizer(
        random_text(SAMPLED_WORDS),
        add_special_tokens=False,
        verbose=False,
    )["input_ids"]
    tokens_per_word = len(sample_ids) / SAMPLED_WORDS
    lengths = generator.lognormal(np.log(MEDIAN_TOKENS), TOKENS_DEVIATION, count)
    lengths = np.clip(lengths, FEWEST_TOKENS, MAX_TOKENS)
    return [random_text(max(1, int(length / tokens_per_word))) for length in lengths]


@dataclass(frozen=True)
class Results:
    """Hidden states and gradients of the texts of the gate, without padding.

    Attributes:
        hidden: hidden states ``[T, D]``, fp32.
        gradients: the gradients of the first layer, fp32, in one vector.
    """

    hidden: Tensor
    gradients: Tensor

    def error(self, exact: Results) -> float:
        """Return the larger of the relative errors of hidden states and gradients, by the norm."""
        hidden_error = (self.hidden - exact.hidden).norm() / exact.hidden.norm()
        gradient_error = (self.gradients - exact.gradients).norm() / exact.gradients.norm()
        return max(float(hidden_error), float(gradient_error))


def check_packed(model: Any, device: torch.device) -> Row:
    """Compare packed and padded texts in the model's dtype with padded ones in fp32.

    Args:
        model: a stock SparseEncoder on a decoder.
        device: its device.

    Returns:
        Cells of the results: the errors of packed and of padded texts, and the gate.
    """
    packed_errors = []
    padded_errors = []
    for side in ("left", "right"):
        trunk = copy.deepcopy(model[0].model.model)
        with torch.no_grad():  # the constant dimension would hide errors
            trunk.embed_tokens.weight.normal_()
        exact = _padded_results(copy.deepcopy(trunk).float(), side, device)
        padded_errors.append(_padded_results(trunk, side, device).error(exact))
        packed_errors.append(_packed_results(trunk, side, device).error(exact))
    packed_error = max(packed_errors)
    padded_error = max(padded_errors)
    allowed = max(ERROR_FACTOR * padded_error, torch.finfo(torch.float32).eps ** 0.5)
    gate = "ok"
    if packed_error > allowed:
        gate = f"packed texts have an error of {packed_error:.3g}, padded ones {padded_error:.3g}"
    return {"error": packed_error, "allowed": allowed, "gate": gate}


def _gate_texts(trunk: Any, side: str, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return random token ids and their mask, ``[B, S]`` each, with padding on one side.

    Args:
        trunk: the decoder without its head.
        side: ``"left"`` or ``"right"``.
        device: the device of the results.
    """
    lengths = torch.tensor(GATE_LENGTHS, device=device)[:, None]
    longest = max(GATE_LENGTHS)
    generator = torch.Generator().manual_seed(0)
    shape = (len(GATE_LENGTHS), longest)
    ids = torch.randint(1, trunk.config.vocab_size, shape, generator=generator).to(device)
    positions = torch.arange(longest, device=device)
    mask = positions >= longest - lengths if side == "left" else positions < lengths
    return ids, mask


def _padded_results(trunk: Any, side: str, device: torch.device) -> Results:
    """Run the texts of the gate with padding through a stock decoder without its head."""
    ids, mask = _gate_texts(trunk, side, device)
    hidden = trunk(input_ids=ids, attention_mask=mask.long()).last_hidden_state[mask]
    return _with_gradients(trunk, hidden)


def _packed_results(trunk: Any, side: str, device: torch.device) -> Results:
    """Run the texts of the gate without padding through a decoder without its head.

    Args:
        trunk: the decoder.
        side: whose texts are run, see :func:`_gate_texts`.
        device: its device.

    Raises:
        RuntimeError: if the decoder cannot be packed.
    """
    from tilefold.integrations.transformers import packed_hidden_states, use_packed

    reason = use_packed(trunk)
    if reason is not None:
        raise RuntimeError(f"the decoder must accept packed tokens, got: {reason}.")
    ids, mask = _gate_texts(trunk, side, device)
    lengths = mask.sum(1)
    offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]).to(torch.int32)
    hidden = packed_hidden_states(trunk, ids[mask], offsets, max(GATE_LENGTHS))
    return _with_gradients(trunk, hidden)


def _with_gradients(trunk: Any, hidden: Tensor) -> Results:
    """Return hidden states, and the gradients of a weighted sum of them."""
    generator = torch.Generator().manual_seed(1)
    weights = torch.randn(hidden.shape, generator=generator).to(hidden.device)
    trunk.zero_grad(set_to_none=True)
    (hidden.float() * weights).sum().backward()  # type: ignore[no-untyped-call]
    gradients = [parameter.grad.float().flatten() for parameter in trunk.layers[0].parameters()]
    return Results(hidden.detach().float(), torch.cat(gradients))


def _free_memory(device: torch.device) -> None:
    """Free memory that nothing uses, and begin a new peak."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def _peak_gib(device: torch.device) -> float:
    """Return the peak of the allocated memory in GiB; 0 on a CPU."""
    return torch.cuda.max_memory_allocated(device) / GIB if device.type == "cuda" else 0.0


def measure_encoding(
    case: JobCase,
    model: Any,
    texts: list[str],
    gate: Row,
    device: torch.device,
) -> Iterator[Row]:
    """Time ways to encode texts, and yield a row for each.

    Args:
        case: the case.
        model: a stock SparseEncoder, which is restored at the end.
        texts: the texts.
        gate: the cells of the gate.
        device: the device.
    """
    from tilefold.integrations.sentence_transformers import accelerate, encode_sparse, restore
    from tilefold.retrieval import encode_collection

    def timed(way: str, encode: Callable[[list[str]], Any], part: int, calls: int) -> Row:
        """Time calls with a part of the texts, after one that warms up."""
        chosen = texts[: len(texts) // part]
        encode(chosen[: len(chosen) // 2])
        _free_memory(device)
        seconds = min(seconds_of(lambda: encode(chosen), device) for _ in range(calls))
        return {
            "case": case.name,
            "work": "encode",
            "way": way,
            "docs_s": len(chosen) / seconds,
            "peak_gib": _peak_gib(device),
            **gate,
        }

    def encode_stock(chosen: list[str]) -> Any:
        return model.encode_document(chosen, batch_size=STOCK_BATCH, show_progress_bar=False)

    def encode_rows(chosen: list[str]) -> Any:
        return encode_sparse(model, chosen)

    yield timed(STOCK, encode_stock, STOCK_PART, 1)
    accelerate(model, packed=False)
    yield timed(PADDED, encode_rows, PADDED_PART, 1)
    accelerate(model)
    yield timed(PACKED, encode_rows, 1, CALLS)
    with tempfile.TemporaryDirectory(prefix="tilefold-bench-") as folder:
        numbers = itertools.count()

        def encode_to_parquet(chosen: list[str]) -> Any:
            documents = {str(number): text for number, text in enumerate(chosen)}
            return encode_collection(model, documents, f"{folder}/{next(numbers)}")

        yield timed(PARQUET, encode_to_parquet, 1, CALLS)
    layers = model[0].model.model.layers
    for layer in layers:
        layer.compile(dynamic=True)
    yield timed(COMPILED, encode_rows, 1, CALLS)
    for layer in layers:
        layer._compiled_call_impl = None
    restore(model)


def measure_training(
    case: JobCase,
    model: Any,
    tokenizer: Any,
    gate: Row,
    device: torch.device,
) -> Iterator[Row]:
    """Time steps of the stock trainer, and yield a row for each number of pairs and each way.

    Args:
        case: the case.
        model: a stock SparseEncoder, which is restored after each way.
        tokenizer: its tokenizer.
        gate: the cells of the gate.
        device: the device.
    """
    model.max_seq_length = MAX_TRAINING_TOKENS
    ways = [STOCK, PADDED, PACKED, GRAPHS, COMPILED] if device.type == "cuda" else [STOCK, PACKED]
    if "mini_batch" in case.numbers:
        ways = [PACKED]
    for batch in case.numbers["pairs"]:
        n_steps = FEW_STEPS if "mini_batch" in case.numbers else MANY_STEPS
        pairs = made_pairs(tokenizer, batch * n_steps, ragged=True)
        first_losses: dict[str, float] = {}
        for way in ways:
            step_ms, first_loss = _train(case, model, pairs, batch, way, device)
            first_losses[way] = first_loss
            row = {
                "case": case.name,
                "work": f"step of {batch} pairs",
                "way": way,
                "p50_ms": statistics.median(step_ms),
                "p80_ms": float(np.percentile(step_ms, 80)),
                "peak_gib": _peak_gib(device),
                "loss": first_loss,
                **gate,
            }
            difference = abs(first_loss / first_losses.get(STOCK, first_loss) - 1)
            if not difference <= LOSS_TOLERANCE:  # also for NaN
                row["gate"] = f"the first loss differs by {difference:.3g}"
            yield row


def _train(
    case: JobCase,
    model: Any,
    pairs: dict[str, list[str]],
    batch: int,
    way: str,
    device: torch.device,
) -> tuple[list[float], float]:
    """Train a model for a few steps, and restore it.

    Args:
        case: the case, with the size of mini-batches, and whether layers are recomputed.
        model: a stock SparseEncoder.
        pairs: queries and documents.
        batch: the pairs per step.
        way: how it is trained.
        device: its device.

    Returns:
        The milliseconds of the timed steps, and the loss of the first step.
    """
    from datasets import Dataset
    from sentence_transformers.sparse_encoder import SparseEncoderTrainer
    from transformers import PrinterCallback, TrainerCallback

    from tilefold.integrations.sentence_transformers import accelerate, restore

    ends: list[float] = []
    losses: list[Tensor] = []

    class Callback(TrainerCallback):
        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            """Record when a step ends."""
            ends.append(time.perf_counter())

    _free_memory(device)
    if way == PADDED:
        accelerate(model, packed=False)
    loss = make_loss("splade", model, STOCK)
    mini_batch = case.numbers.get("mini_batch")
    if mini_batch is not None:
        loss = _in_mini_batches(model, loss, mini_batch)
    loss.register_forward_hook(
        lambda module, inputs, output: losses.append(sum(output.values()).detach()),
    )
    n_steps = FEW_STEPS if mini_batch or way in (STOCK, PADDED) else MANY_STEPS
    with tempfile.TemporaryDirectory(prefix="tilefold-bench-") as folder:
        trainer = SparseEncoderTrainer(
            model=model,
            args=_training_arguments(case, batch, n_steps, device, folder),
            train_dataset=Dataset.from_dict(pairs),
            loss=loss,
        )
        trainer.add_callback(Callback())
        trainer.remove_callback(PrinterCallback)
        if way in (PACKED, GRAPHS, COMPILED):
            # None uses graphs if they are possible
            graphs = None if way in (GRAPHS, COMPILED) else False
            print(accelerate(trainer, graphs=graphs, compiled=way == COMPILED), file=sys.stderr)
        trainer.train()
    restore(model)
    model.zero_grad(set_to_none=True)
    durations = [1e3 * (end - start) for start, end in itertools.pairwise(ends)]
    return durations[len(durations) // 2 :], float(losses[0])


def _training_arguments(
    case: JobCase,
    batch: int,
    n_steps: int,
    device: torch.device,
    folder: str,
) -> Any:
    """Return the arguments of the stock trainer, which saves and reports nothing.

    Args:
        case: the case, with LoRA or not, and whether layers are recomputed.
        batch: the pairs per step.
        n_steps: the number of steps.
        device: the device. A GPU trains under bf16 autocast.
        folder: an empty folder.
    """
    from sentence_transformers.sparse_encoder import SparseEncoderTrainingArguments

    from tilefold.integrations.transformers import one_gpu

    on_gpu = device.type == "cuda"
    return one_gpu(SparseEncoderTrainingArguments)(
        output_dir=folder,
        max_steps=n_steps,
        per_device_train_batch_size=batch,
        learning_rate=LEARNING_RATE,
        lr_scheduler_type="constant",
        optim="sgd" if case.numbers.get("lora") is None else "adamw_torch_fused",
        max_grad_norm=0.0,
        gradient_checkpointing=case.numbers.get("checkpointing", False),
        gradient_checkpointing_kwargs={"use_reentrant": False},
        bf16=on_gpu,
        use_cpu=not on_gpu,
        dataloader_pin_memory=on_gpu,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        seed=1,
    )


def _in_mini_batches(model: Any, loss: Any, mini_batch: int) -> Any:
    """Return a loss whose gradients are cached, with the parts of a stock ``SpladeLoss``.

    Args:
        model: the model.
        loss: the stock loss.
        mini_batch: the pairs that are encoded together.
    """
    from tilefold.losses.base_splade import JoinedSpladeLoss

    return JoinedSpladeLoss(
        model=model,
        loss=loss.loss,
        document_regularizer_weight=loss.document_regularizer_weight,
        query_regularizer_weight=loss.query_regularizer_weight,
        mini_batch_size=mini_batch,
    )


def measure(case: JobCase, options: JobOptions) -> Iterator[Row]:
    """Check a decoder, time its encoding and its training, and yield the rows.

    Args:
        case: the case.
        options: the options of the command line.
    """
    tokenizer = load_tokenizer(options.tokenizer)
    tokenizer.model_max_length = MAX_TOKENS
    model = make_decoder(case, tokenizer, options.device)
    model.max_seq_length = MAX_TOKENS
    gate = check_packed(model, options.device)
    _free_memory(options.device)
    if case.numbers["texts"]:
        texts = make_abstracts(tokenizer, case.numbers["texts"])
        yield from measure_encoding(case, model, texts, gate, options.device)
    if case.numbers.get("lora") is not None:
        train_with_lora(model, case.numbers["lora"])
    yield from measure_training(case, model, tokenizer, gate, options.device)


DECODERS = Job(
    name="decoders",
    cases=CASES,
    key=("case", "work", "way"),
    shown=("work", "way", "docs_s", "p50_ms", "p80_ms", "peak_gib", "loss", "error", "gate"),
    run=measure,
)

if __name__ == "__main__":
    sys.exit(main(DECODERS, __doc__, sys.argv[1:]))
