"""The texts that a run is trained on and validated with, and whether the machine can train on them at all."""

from __future__ import annotations

import torch

from transformer_xl.config import RunConfig, UserError
from transformer_xl.device import require_memory, resolve_dtype
from transformer_xl.model.sizes import min_activations, min_cache, min_parameters, min_weight_bytes
from transformer_xl.ops.kernels import choose
from transformer_xl.text.segments import SegmentDataset, TokenDataset, check_training
from transformer_xl.text.shuffled import ShuffledDocumentDataset, cut
from transformer_xl.text.token_store import Corpus
from transformer_xl.training.distributed import SINGLE_PROCESS, DistributedContext
from transformer_xl.training.stepper import micro_batches
from transformer_xl.training.trackers import check_trackers
from transformer_xl.training.validation import Validator
from transformer_xl.xlnet.objective import PermutedDataset

_ADVICE = (
    "lower train.micro_batch_size, train.segment_length, train.memory_length or train.batch_size, set "
    "train.activation_checkpointing, or make the model smaller (model.n_layers, model.d_model, model.ngram_buckets)"
)


def open_data(
    config: RunConfig, corpus: Corpus, device: torch.device, world: DistributedContext = SINGLE_PROCESS
) -> tuple[TokenDataset, Validator | None]:
    """Open the training text and, if the corpus has one, the validation text, and check that training can start.

    Raises:
        UserError: a text is too short for batch size and segment length, an attention implementation or package is
            not available, or training certainly needs more memory than there is.
    """
    dataset = training_dataset(corpus, config, world)
    train, rows = config.train, dataset.local_batch_size
    if config.model.reads_backward and any(len(part) % 2 for part in micro_batches(rows, train, world.size)):
        raise UserError(
            f"model.bi_data reads every second row backward, and {rows:,} rows make odd micro-batches; give a "
            "batch_size that is a multiple of micro_batch_size and of twice the number of processes"
        )
    num_bytes = min_training_bytes(config, rows, resolve_dtype(device, train.dtype), world.size)
    task = f"training on {rows:,} x {train.num_inputs:,} tokens with a memory of {rows:,} x {train.memory_length:,}"
    require_memory(task, num_bytes, device, _ADVICE)
    validator = Validator(corpus, config, world) if "valid" in corpus.splits else None
    if config.model.attention_kernel is not None:
        choose(config.model.attention_kernel, device, torch.float32)  # raises if it does not work on the device
    check_trackers(config.train)
    return dataset, validator


def training_dataset(corpus: Corpus, run: RunConfig, world: DistributedContext = SINGLE_PROCESS) -> TokenDataset:
    """Return the training text as segments, in text order or in shuffled pieces, or with orders of prediction.

    Raises:
        UserError: the text is too short for batch size and segment length, or has too few documents to shuffle.
    """
    split, bos_token_id, config = corpus.split("train"), corpus.tokenizer.bos_token_id, run.train
    # a step with a random segment length reads as many segments of one token
    unit = 1 if config.random_segment_lengths else config.segment_length
    sizes = {"batch_size": config.batch_size, "segment_length": unit, "shard": world.shard}
    dataset: TokenDataset = SegmentDataset(split.tokens, **sizes, bos_token_id=bos_token_id)
    if config.shuffle_documents or config.shuffle_length:
        starts = split.document_starts if config.shuffle_documents else split.document_starts[:1]
        if config.shuffle_length:
            # rows of a short text have equally many pieces, one at least
            per_row = max(1, len(split.tokens) // config.batch_size)
            starts = cut(starts, len(split.tokens), -(-per_row // -(-per_row // config.shuffle_length)))
        dataset = ShuffledDocumentDataset(split.tokens, starts, **sizes, bos_token_id=bos_token_id, seed=config.seed)
    if (model := run.model.orders) is not None:
        dataset = PermutedDataset(
            split.tokens, split.document_starts, **sizes, bos_token_id=bos_token_id, seed=config.seed, model=model
        )
    check_training(dataset, config.segment_length)
    return dataset


def min_training_bytes(config: RunConfig, local_batch_size: int, dtype: str, num_processes: int = 1) -> int:
    """Return a lower bound of the memory that training needs at once in one process.

    Args:
        config: settings of the run.
        local_batch_size: batch rows of the process.
        dtype: data type of matrix products.
        num_processes: number of processes that train together.
    """
    train, model = config.train, config.model
    # fsdp divides weights and state; a process has all weights only before the first step, as `build_checked` requires
    share = num_processes if train.parallelism == "fsdp" else 1
    weights = min_weight_bytes(model) // share
    trained = 0 if config.lora else 4 * min_parameters(model) // share  # an adapter is small
    # tables of which only the rows that are looked up have gradients and state
    by_rows = 0 if train.ngram_learning_rate_ratio is None else model.ngram_table_parameters
    whole = max(0, trained - 4 * by_rows)
    # two numbers for each trained parameter in Adam, one or more in others, and the average
    state = whole * (1 + (train.optimizer in ("adam", "adamw"))) + trained * (train.weight_average != "none")
    num_rows = max(map(len, micro_batches(local_batch_size, train, num_processes)))
    activations = num_rows * min_activations(
        model,
        segment_length=train.num_inputs,
        memory_length=train.memory_length,
        recomputed=train.activation_checkpointing or train.compile != "none",  # compiled layers recompute some
    )
    memory = 4 * local_batch_size * min_cache(model, train.memory_length, training=True)
    # activations are freed while the gradients appear; there is a memory before the step and one after it
    return weights + state + max(whole, (2 if dtype == "bfloat16" else 4) * activations) + 2 * memory
