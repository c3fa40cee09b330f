"""The texts that a run is trained on and validated with, and whether the machine can train on them at all."""

from __future__ import annotations

import torch

from transformer_xl.config import RunConfig, TrainConfig
from transformer_xl.device import MemoryUse, require_memory, resolve_dtype
from transformer_xl.model.sizes import MIN_LAYER_BYTES, min_activations, min_cache, min_parameters
from transformer_xl.ops.kernels import choose
from transformer_xl.text.segments import SegmentDataset, TokenDataset, check_training
from transformer_xl.text.shuffled import ShuffledDocumentDataset
from transformer_xl.text.token_store import Corpus
from transformer_xl.training.distributed import SINGLE_PROCESS, DistributedContext
from transformer_xl.training.metrics_log import check_tensorboard
from transformer_xl.training.stepper import micro_batches
from transformer_xl.training.validation import Validator


def open_data(
    config: RunConfig, corpus: Corpus, device: torch.device, world: DistributedContext = SINGLE_PROCESS
) -> tuple[TokenDataset, Validator | None]:
    """Open the training text and, if the corpus has one, the validation text, and check that training can start.

    Raises:
        UserError: a text is too short for batch size and segment length, an attention implementation or package is
            not available, or training certainly needs more memory than there is.
    """
    dataset = training_dataset(corpus, config.train, world)
    require_memory("training", training_memory(config, dataset.local_batch_size, device, world), device)
    validator = Validator(corpus, config.train, world) if "valid" in corpus.splits else None
    if config.model.attention_kernel is not None:
        choose(config.model.attention_kernel, device, torch.float32)  # raises if it does not work on the device
    check_tensorboard(config.train)
    return dataset, validator


def training_dataset(corpus: Corpus, config: TrainConfig, world: DistributedContext = SINGLE_PROCESS) -> TokenDataset:
    """Return the training text as segments, of the documents in text order or shuffled.

    Raises:
        UserError: the text is too short for batch size and segment length, or has too few documents to shuffle.
    """
    split, bos_token_id = corpus.split("train"), corpus.tokenizer.bos_token_id
    # a step with a random segment length reads as many segments of one token
    unit = 1 if config.random_segment_lengths else config.segment_length
    sizes = {"batch_size": config.batch_size, "segment_length": unit, "shard": world.shard}
    dataset: TokenDataset = SegmentDataset(split.tokens, **sizes, bos_token_id=bos_token_id)
    if config.shuffle_documents:
        dataset = ShuffledDocumentDataset(
            split.tokens, split.document_starts, **sizes, bos_token_id=bos_token_id, seed=config.seed
        )
    check_training(dataset, config.segment_length)
    return dataset


def training_memory(
    config: RunConfig, local_batch_size: int, device: torch.device, world: DistributedContext = SINGLE_PROCESS
) -> list[MemoryUse]:
    """Return lower bounds of the memory that training needs at once in this process.

    Args:
        config: settings of the run.
        local_batch_size: batch rows of this process.
        device: device to compute on.
        world: the processes that train together.
    """
    train, model = config.train, config.model
    rows = [len(part) for part in micro_batches(local_batch_size, train, world.size)]
    parameters = min_parameters(model)
    trained = 0 if config.lora else parameters  # an adapter is small
    # fsdp divides all of these; a process has all weights only before the first step, as `build_checked` requires
    share = world.size if train.parallelism == "fsdp" else 1
    gradients = 4 * trained // share
    # weights, two numbers for each trained parameter in Adam and one in Muon, and the average
    state = 4 * parameters // share + gradients * (1 + (train.optimizer != "muon") + (train.weight_average != "none"))

    def activation_bytes(memory_length: int) -> int:
        count = min_activations(
            model,
            segment_length=train.num_inputs,
            memory_length=memory_length,
            recomputed=train.activation_checkpointing or train.compile != "none",  # compiled layers recompute some
        )
        return (2 if resolve_dtype(device, train.dtype) == "bfloat16" else 4) * max(rows) * count

    activations, new_activations = activation_bytes(train.memory_length), activation_bytes(0)
    # a single micro-batch frees its activations while the gradients appear
    state += gradients if len(rows) > 1 else max(0, gradients - activations)
    cache = 4 * local_batch_size * min_cache(model, train.memory_length, training=True)
    ngrams = "model.ngram_buckets, model.d_ngram, " if model.max_ngram > 1 else ""
    fewer_rows = f"set train.micro_batch_size below {max(rows):,}, or " if max(rows) > 1 else ""
    return [
        MemoryUse(
            f"weights, gradients and optimizer state of {parameters:,} parameters",
            state + MIN_LAYER_BYTES * model.n_layers,
            f"lower {ngrams}model.n_layers or the widths of the model (model.d_model and so on)",
        ),
        MemoryUse(
            f"the activations of {max(rows):,} x {train.num_inputs:,} tokens",
            new_activations,
            f"{fewer_rows}lower train.segment_length, or set train.activation_checkpointing",
        ),
        MemoryUse(
            f"a memory of {local_batch_size:,} x {train.memory_length:,} tokens",
            2 * cache + activations - new_activations,  # before and after the step, and its keys and values
            "lower train.memory_length or train.batch_size",
        ),
    ]
