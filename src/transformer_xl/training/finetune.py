"""`finetune`, the public function that trains the weights of a run further, on another corpus.

The new run has its own optimizer, schedule and folder, and resumes as every run does. `config.yaml` records the base.
With another tokenizer, tokens that both have keep their embeddings and biases. With LoRA the run trains and stores an
adapter, and the weights stay in the folder of the base.

Shape suffix: V tokens of the new vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from transformer_xl.checkpoint_record import CheckpointName
from transformer_xl.config import (
    FinetuneConfig,
    LoraConfig,
    RunConfig,
    UserError,
    check_settings,
    check_type,
    checked_names,
    given_settings,
)
from transformer_xl.files import as_path, quoted
from transformer_xl.model.lora import check_lora, lora_targets, require_peft
from transformer_xl.progress import say
from transformer_xl.run import Run, check_run, load
from transformer_xl.tensor_file import contents_digest
from transformer_xl.text.token_store import Corpus
from transformer_xl.text.tokenizers import describe_difference
from transformer_xl.training.callbacks import Callback
from transformer_xl.training.first_weights import first_weights, num_kept, old_ids
from transformer_xl.training.text_losses import LOSS_TOKENS, check_evaluation, text_losses
from transformer_xl.training.train import (
    Overrides,
    TrainResult,
    complete_settings,
    corpus_folder,
    ignore,
    run_training,
    start_run,
)

if TYPE_CHECKING:
    from transformer_xl.config import EvaluationConfig, ModelConfig, TrainConfig
    from transformer_xl.config.typed_settings import EvaluationSettings, ModelSettings, TrainSettings

_CONVERTED_RATE = 1e-4  # of runs whose own rate is not known, or is that of an adapter
# Settings of training that are not the base's: a short schedule.
_SCHEDULE = {
    "max_steps": 1000, "warmup_steps": 50, "lr_schedule": "cosine", "decay_steps": 0,
    "weight_average": "none", "average_start_step": 0, "average_learning_rate": None,
    "eval_interval": 250, "checkpoint_interval": 250,
}  # fmt: skip
# Settings of the model that its weights do not depend on: regularization, how far attention looks back, and XLNet's
# objective.
_CHANGEABLE = (
    *("dropout", "attention_dropout", "zoneout", "regularization"),
    *("attention_window", "clamp_length", "attend_empty_memory", "attn_implementation"),
    *(
        "perm_size",
        "reuse_length",
        "num_predict",
        "mask_alpha",
        "mask_beta",
        "max_gram",
        "functional_tokens",
        "bi_data",
    ),
)


@checked_names
def finetune(
    base: Run | Path | str,
    corpus: Corpus | Path | str,
    run: Path | str | None = None,
    *,
    replace_tokenizer: bool = False,
    freeze: Sequence[str] = (),
    layer_rate_decay: float = 1.0,
    lora_rank: int | None = None,
    lora_alpha: float | None = None,
    lora_dropout: float | None = None,
    lora_targets: Sequence[str] = (),
    checkpoint: CheckpointName = "best",
    model: ModelSettings | ModelConfig | None = None,
    train: TrainSettings | TrainConfig | None = None,
    evaluation: EvaluationSettings | EvaluationConfig | None = None,
    device: str = "auto",
    threads: int | None = None,
    callbacks: Sequence[Callback] = (),
    progress: bool = True,
    handle_signals: bool = False,
) -> TrainResult:
    """Train the weights of a run further on another corpus, as a new run.

    The settings are those of the base (the learning rate of a converted run and of an adapter, merged or not, is 1e-4),
    with a schedule of 1000 steps and validation every 250, unless `train` says otherwise. `resume` continues the new
    run bit for bit; the base is needed only of an adapter, and for the losses.

    Args:
        base: a run, trained here or converted, as a folder or loaded from one, with the weights that are stored there.
            It is not changed.
        corpus: corpus to train on, or the folder that `txl prepare` created.
        run: new folder, or None for runs/CORPUS-BASE.
        replace_tokenizer: whether the corpus may have another tokenizer than the base. Tokens that both have keep
            their embeddings and softmax weights, and others begin with the mean of all. Cutoffs beyond the new
            vocabulary are dropped, and n-gram embeddings begin at random, as they depend on token ids.
        freeze: patterns of names of parameters that are not trained, such as `embedding.*` or `layers.0.*`.
        layer_rate_decay: factor between the learning rates of a layer and the layer above it, 0 to 1 (Howard and Ruder
            2018); 1: equal rates.
        lora_rank: train a LoRA adapter of this rank, and nothing else (Hu et al. 2021; the extra `lora`); None: train
            the weights.
        lora_alpha: the adapter's product is scaled by alpha / rank; None means twice the rank.
        lora_dropout: probability that dropout zeroes an input of the adapter; None means 0.
        lora_targets: names of the linear layers that are adapted, such as ["q_proj", "v_proj"]; empty: all.
        checkpoint: the base's weights with the lowest validation loss (best), or those of its newest checkpoint (last).
        model: settings of the model to change, such as {"dropout": 0.1}; its weights may not depend on them.
        train: settings of training to change, such as {"max_steps": 500, "memory_length": 256}.
        evaluation: settings of evaluation to change.
        device: as for `train`.
        threads: as for `train`.
        callbacks: as for `train`.
        progress: as for `train`.
        handle_signals: as for `train`.

    Returns:
        The result; `.run` is the trained model, and `.losses` says what was gained on the new text and lost on the
        base's. Both are measured with the settings and memory length of the new run, on the first 65,536 tokens of the
        test text (validation text if there is none).

    Raises:
        UserError: the base, settings, corpus or run folder are invalid, the corpus has another tokenizer, texts cannot
            be scored with the settings of evaluation, a setting of the model would change its weights, a pattern
            matches no parameter, or a reason that `train` lists.
        KeyboardInterrupt: Ctrl-C was pressed, unless `handle_signals`.
    """
    base_run = open_base(base, checkpoint)
    assert base_run.path is not None
    check_type(replace_tokenizer, bool, "replace_tokenizer", "give True or False")
    _check_names(lora_targets, "lora_targets", "give a list of names such as ['q_proj', 'v_proj']")
    given = given_settings(model=model, train=train, evaluation=evaluation)
    path = corpus_folder(corpus)
    opened = Corpus.open(path)
    old_of_V = old_ids(base_run, opened)
    if old_of_V is not None:
        _check_tokens(base_run, opened, old_of_V, replace_tokenizer=replace_tokenizer)
    lora = _lora(base_run, lora_rank, lora_alpha, lora_dropout, lora_targets)
    if lora is not None and old_of_V is not None:
        raise UserError("an adapter has no embeddings for the tokens of another tokenizer; leave out lora_rank")
    record = base_record(base_run, freeze=freeze, layer_rate_decay=layer_rate_decay, lora=lora)
    if run is None:
        run = Path("runs", f"{path.resolve().name}-{base_run.path.resolve().name}")
    settings = tuned_settings(base_run, opened.tokenizer.vocab_size, given["model"], record)
    kept = None if old_of_V is None else num_kept(base_run, settings, old_of_V)
    record["kept_tokens"] = kept
    if progress and kept is not None and old_of_V is not None:
        say(f"{kept:,} of {len(old_of_V):,} tokens keep their embeddings; the others begin with the mean")
    # those of an adapter are drawn, beside the base's
    first = partial(first_weights, base_run.model, old_of_V) if lora is None else None
    groups: dict[str, Overrides] = {**given, "finetune": record}
    check_evaluation(base_run, opened, complete_settings(settings, path, groups, ignore)[0])
    start = partial(start_run, settings, path, as_path(run, "run"), groups, first_weights=first)
    result = run_training(start, device, threads, callbacks, progress=progress, handle_signals=handle_signals)
    if result.finished and result.rank == 0:
        losses = text_losses(base_run, opened, result.run, say if progress else ignore)
        return replace(result, losses=losses)
    return result


def open_base(base: Run | Path | str, checkpoint: CheckpointName = "best") -> Run:
    """Return the run that fine-tuning begins with, which may be loaded already; arguments as for `finetune`.

    Raises:
        UserError: it is in no folder, or has other weights than its folder, of 8 bits or an adapter beside them.
    """
    run = base
    if not isinstance(run, Run):
        run = load(as_path(run, "base", "give a run"), device="cpu", checkpoint=checkpoint)
    check_run(run)
    if run.path is None or run.weights is None:
        raise UserError("the base is a model in no folder; save it (save(run, PATH)) and give that folder")
    run.model.check_plain("fine-tuned")
    if isinstance(base, Run):
        _check_stored(base)
    return run


def base_record(
    base: Run, *, freeze: Sequence[str], layer_rate_decay: float, lora: Overrides | None = None
) -> dict[str, Any]:
    """Return the settings of `FinetuneConfig` for a base; arguments as for `finetune`.

    Raises:
        UserError: one of them is invalid.
    """
    _check_names(freeze, "freeze", "give a list of patterns such as ['embedding.*']")
    assert base.path is not None
    assert base.weights is not None
    used = base.weights.used
    record = {
        "base": str(base.path.resolve()),
        "base_sha256": contents_digest(used.file),
        "base_step": used.step,
        "freeze": tuple(freeze),
        "layer_rate_decay": layer_rate_decay,
        "lora": lora,
    }
    check_settings(FinetuneConfig, record, "finetune")
    return record


def _check_names(names: object, argument: str, advice: str) -> None:
    """Check that an argument is a list of names."""
    if isinstance(names, str) or not isinstance(names, Sequence) or not all(isinstance(name, str) for name in names):
        raise UserError(f"{argument} is {names!r}; {advice}")


def _check_stored(base: Run) -> None:
    """Check that a loaded run has the weights of its folder, which the new run records as those that it began with.

    Raises:
        UserError: they changed since they were loaded, in memory or in the folder.
    """
    assert base.path is not None
    assert base.weights is not None
    stored = load(base.path, device="cpu", checkpoint=base.weights.used.name).model.state_dict()
    for name, weight in base.model.state_dict().items():
        if not torch.equal(weight.to(stored[name]), stored[name]):
            raise UserError(
                f"the base has other weights than {base.path} (at {name}): they changed since they were loaded; save "
                "it (save(run, PATH)) and give that folder, or load it again"
            )


def _lora(
    base: Run, rank: int | None, alpha: float | None, dropout: float | None, targets: Sequence[str]
) -> dict[str, Any] | None:
    """Return the settings of the adapter, or None if the weights are trained.

    Raises:
        UserError: there is an argument of an adapter without a rank, the base is an adapter itself, or it cannot have
            this one.
    """
    if rank is None:
        given = {"lora_alpha": alpha, "lora_dropout": dropout, "lora_targets": targets or None}
        if unused := [name for name, value in given.items() if value is not None]:
            raise UserError(f"{unused[0]} has no effect without lora_rank; give that too, or leave it out")
        return None
    if base.config.lora is not None:
        assert base.path is not None
        raise UserError(
            f"{base.path} is an adapter itself; merge it first (txl convert {quoted(base.path)} RUN), or fine-tune all "
            "its weights (without lora_rank)"
        )
    require_peft()
    check_type(rank, int, "lora_rank", "give an integer")
    values = {
        "rank": rank,
        "alpha": 2.0 * max(rank, 1) if alpha is None else alpha,
        "dropout": dropout or 0.0,
        "targets": tuple(dict.fromkeys(targets)) or tuple(lora_targets(base.model)) or ("none",),
    }
    check_lora(base.model, check_settings(LoraConfig, values, flags="lora_"))
    return values


def _check_tokens(base: Run, corpus: Corpus, old_of_V: npt.NDArray[np.int64], *, replace_tokenizer: bool) -> None:
    """Check that a corpus may have another tokenizer than the base, and that they have tokens in common."""
    assert base.path is not None
    difference = describe_difference(corpus.tokenizer, base.tokenizer)
    if not replace_tokenizer:
        raise UserError(
            f"{corpus.path} has another tokenizer than {base.path} ({difference}); prepare it with the "
            f"run's (txl prepare FILES --tokenizer {quoted(base.path)}), or give replace_tokenizer to learn the "
            "embeddings of tokens that the run lacks"
        )
    if not (old_of_V >= 0).any():
        raise UserError(f"{corpus.path} and {base.path} have no token in common ({difference}); train a new model")


def tuned_settings(base: Run, vocab_size: int, overrides: Overrides, record: Overrides) -> RunConfig:
    """Return the settings that fine-tuning starts from: those of the base with a short schedule.

    Args:
        base: the base.
        vocab_size: number of tokens of the new tokenizer.
        overrides: settings of the model that will replace the base's.
        record: what the settings say about fine-tuning, as `base_record` returns it.

    Raises:
        UserError: a setting in `overrides` could change the weights or what they mean.
    """
    same = {"architecture": base.config.model.architecture}.items()  # an object has it too
    if fixed := [name for name, value in overrides.items() if name not in _CHANGEABLE and (name, value) not in same]:
        raise UserError(
            f"model.{fixed[0]} cannot change in fine-tuning; leave it out. Only these settings of the model can: "
            f"{', '.join(_CHANGEABLE)}"
        )
    config = base.config
    is_of_adapter = config.finetune is not None and (config.finetune.lora is not None or config.finetune.merged)
    is_own_rate = config.corpus is not None and not is_of_adapter
    rate = config.train.learning_rate if is_own_rate else _CONVERTED_RATE
    train = config.train.model_dump() | _SCHEDULE | {"learning_rate": rate, "eval_tokens": LOSS_TOKENS}
    assert config.model.cutoffs != "auto"  # a model has been built
    cutoffs = tuple(cutoff for cutoff in config.model.cutoffs if cutoff < vocab_size)
    model = config.model.model_dump() | {"vocab_size": vocab_size, "cutoffs": cutoffs}
    if (xlnet := config.model.orders) is not None:
        model |= xlnet.following(config.train.segment_length)
        if xlnet.functional_ids == base.tokenizer.separators:  # another tokenizer has others
            model["functional_tokens"] = "auto"
    settings = config.model_dump() | {"recipe": None, "corpus": None, "history": (), "finetune": record}
    return check_settings(RunConfig, settings | {"model": model, "train": train}, "the base")
