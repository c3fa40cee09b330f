"""What fine-tuning gained on the new text and lost on the base's own: losses before and after.

Shape suffix: V tokens of the new vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from transformer_xl.architectures import build_model
from transformer_xl.config import RunConfig, UserError
from transformer_xl.evaluation.evaluate import EvaluationResult, evaluate
from transformer_xl.progress import note
from transformer_xl.run import Run, load_run
from transformer_xl.run_folder import RunFolder
from transformer_xl.tensor_file import contents_digest
from transformer_xl.text.token_store import Corpus, TokenSplit
from transformer_xl.training.first_weights import first_weights, old_ids

LOSS_TOKENS = 65_536
"""Number of tokens of each text that are scored, from its start."""


@dataclass(frozen=True)
class TextLoss:
    """The loss of a text before and after fine-tuning, in nats per token of the run that scored it."""

    text: str
    """new, the corpus of the new run, or old, that of the base."""
    split: str
    """test, or valid without a test text."""
    num_tokens: int
    before: float
    after: float


def losses_of_resumed(tuned: Run, log: Callable[[str], None]) -> tuple[TextLoss, ...]:
    """Return the losses of the new and the old text of a fine-tuned run that was resumed and is finished.

    If its base is no longer there, or was altered, there are none, and a note says why.
    """
    try:
        return text_losses(_open_base(tuned), tuned.open_corpus(), tuned, log)
    except UserError as error:
        note(f"what was gained and lost is unknown: {error}", log)
        return ()


def _open_base(tuned: Run) -> Run:
    """Load the base with the weights that fine-tuning began with; it may have moved with the run.

    Raises:
        UserError: it is not there or is damaged, or its weights are others.
    """
    finetune = tuned.config.finetune
    assert finetune is not None
    assert tuned.path is not None
    folders = Path(finetune.base), tuned.path.parent / Path(finetune.base).name
    folder = RunFolder.open(next((folder for folder in folders if folder.is_dir()), folders[0]))
    chosen = folder.choose_weights()
    for weights in (chosen.used, *chosen.others):
        if contents_digest(weights.file) == finetune.base_sha256:
            return load_run(folder, torch.device("cpu"), weights.name)
    raise UserError(
        f"{folder.path} no longer has the weights of step {finetune.base_step:,} that fine-tuning began with; restore "
        "them to measure it"
    )


def text_losses(base: Run, corpus: Corpus, tuned: Run, log: Callable[[str], None]) -> tuple[TextLoss, ...]:
    """Return the losses of the new and the old text before and after fine-tuning, as far as they can be measured.

    Args:
        base: the run that fine-tuning began with.
        corpus: the corpus of the new run.
        tuned: the new run.
        log: prints a line for the user.
    """
    old_of_V = old_ids(base, corpus)
    model, device = base.model, next(tuned.model.parameters()).device
    if model.training or model.device != device:
        model = deepcopy(model)  # the caller's stays as it is
    if old_of_V is not None:
        model = build_model(tuned.config.model)
        model.load_state_dict(dict(first_weights(base.model, old_of_V, tuned.config)))
    # with the settings and the memory length of the new run, so that the weights alone differ
    start = replace(tuned, model=model.to(device).eval())
    texts = [("new", corpus)]
    try:
        if old_of_V is not None:
            raise UserError("it has the tokens of another tokenizer")
        old, recorded = base.open_corpus(), base.config.corpus
        if recorded is not None and recorded.train_sha256 != old.record.splits["train"].sha256:
            raise UserError(f"{old.path} has another text now")
        if old.record.splits["train"].sha256 != corpus.record.splits["train"].sha256:
            texts.append(("old", old))
    except UserError as error:
        note(f"what was lost on the base's own text is unknown: {error}", log)
    losses: list[TextLoss] = []
    for name, text in texts:
        split = next((split for split in ("test", "valid") if split in text.splits), None)
        if split is None:
            continue
        try:
            before, after = (_score(run, text.split(split), corpus, LOSS_TOKENS) for run in (start, tuned))
        except UserError as error:  # must not hide the result of training
            note(f"the loss of the {name} text is unknown: {error}", log)
            continue
        losses.append(TextLoss(name, split, after.tokens, before.nats_per_token, after.nats_per_token))
    return tuple(losses)


def check_evaluation(base: Run, corpus: Corpus, config: RunConfig) -> None:
    """Check, before a run is trained, that texts can be scored with its settings of evaluation.

    Args:
        base: the run whose weights it begins with.
        corpus: the corpus that it is trained on.
        config: its settings.

    Raises:
        UserError: settings contradict each other or the model.
    """
    if config.evaluation.method == "dynamic" and config.evaluation.dynamic.optimizer == "rms":
        # as little as possible of the training text
        dynamic = config.evaluation.dynamic.model_copy(update={"gradient_stats_tokens": 1})
        evaluation = config.evaluation.model_copy(update={"dynamic": dynamic})
        config = config.model_copy(update={"evaluation": evaluation})
    is_same_vocabulary = config.model.vocab_size == base.config.model.vocab_size
    model = base.model if is_same_vocabulary else build_model(config.model)
    _score(Run(model, corpus.tokenizer, config), corpus.split("train"), corpus, 1)


def _score(run: Run, split: TokenSplit, corpus: Corpus, max_tokens: int) -> EvaluationResult:
    """Score the start of a text; method dynamic needs the training text, which is that of the new run."""
    return evaluate(run, split, max_tokens=max_tokens, train_split=corpus.split("train"))
