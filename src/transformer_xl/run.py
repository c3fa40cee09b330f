"""A trained model with its tokenizer and settings: `Run`; and `load` and `save`, which read and write its folder."""

from __future__ import annotations

import hashlib
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from typing_extensions import override

from transformer_xl.checkpoint_record import CheckpointName, ChosenWeights, MemoryLengths
from transformer_xl.config import RunConfig, UserError, check_type, checked_names
from transformer_xl.device import Precision, choose_device, resolve_dtype
from transformer_xl.display import Displayed
from transformer_xl.files import as_path
from transformer_xl.inference import InferenceModel, prepare_inference
from transformer_xl.inference.fingerprint import Fingerprint, sample_of
from transformer_xl.inference.int8 import int8_tensors
from transformer_xl.model.language_model import LanguageModel
from transformer_xl.model.lora import merge_lora
from transformer_xl.run_folder import RunFolder, load_weights, model_digest, with_weights
from transformer_xl.text.token_store import Corpus
from transformer_xl.text.tokenizers import Tokenizer

_PREPARING = threading.Lock()  # of all runs, as one with a lock of its own could not be copied or pickled


@dataclass(frozen=True, repr=False)
class Run(Displayed):
    """A trained model with its tokenizer and settings, ready to use."""

    model: LanguageModel
    tokenizer: Tokenizer
    config: RunConfig
    path: Path | None = None
    """Folder that the run was loaded from, or None for a model that is in no folder."""
    weights: ChosenWeights | None = None
    """Which of the run's weights the model has; None for a model that was not loaded from a run folder."""
    _prepared: dict[str, tuple[InferenceModel, Fingerprint]] = field(default_factory=dict, init=False, compare=False)
    _sample: torch.Tensor | None = field(default=None, init=False, compare=False)  # of the weights as they were loaded

    def __post_init__(self) -> None:
        if self.weights is not None and self.weights.used.memory_lengths is not None:
            object.__setattr__(self, "_sample", sample_of(self.model))

    def inference(self, dtype: Precision = "float32") -> InferenceModel:
        """Return the model prepared for reading and generating.

        It is prepared once for each dtype, and again if the weights have changed since, as far as `Fingerprint` sees
        it; then memories of before are refused.

        Args:
            dtype: of matrix products: float32, bfloat16, or auto.
        """
        resolved = resolve_dtype(self.model.device, dtype, self.model.like.dtype)
        with _PREPARING:  # or two threads prepare one each, and refuse each other's memories
            prepared, fingerprint = self._prepared.get(resolved, (None, None))
            if prepared is None or fingerprint is None or not fingerprint.matches(self.model):
                if prepared is not None:
                    self._prepared.clear()  # those of other dtypes are of the old weights too
                prepared = prepare_inference(self.model, dtype)
                self._prepared[resolved] = prepared, Fingerprint(self.model)
            return prepared

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_prepared": {}}  # a copy prepares its own

    @property
    def memory_lengths(self) -> MemoryLengths | None:
        """Losses of the weights at several memory lengths; None if not measured, or if they have changed since."""
        if self.weights is None or self._sample is None or not torch.equal(sample_of(self.model), self._sample):
            return None
        return self.weights.used.memory_lengths

    @property
    def weights_values(self) -> dict[str, Any]:
        """Which weights the model has, by the names of JSON output; empty for a model that was not loaded."""
        return self.weights.as_dict() if self.weights else {}

    @override
    def summary(self) -> dict[str, Any]:
        model = f"{self.config.model.architecture}, {self.model.num_parameters():,} parameters"
        corpus = {"corpus": self.config.corpus.path} if self.config.corpus else {}
        device = str(next(self.model.parameters()).device)
        used = {"weights": self.weights.used.describe()} if self.weights else {}
        return {"path": self.path, "model": model, **used, "device": device, "tokenizer": self.tokenizer, **corpus}

    def open_corpus(self) -> Corpus:
        """Open the corpus the run was trained on.

        Raises:
            UserError: the run records no corpus, it does not exist, or its tokenizer is not that of the run.
        """
        return RunFolder(self.path or Path("this run"), self.config, self.tokenizer).open_corpus()


def check_run(run: object) -> None:
    """Check that an argument of a public function is a loaded run.

    Raises:
        UserError: it is something else.
    """
    check_type(run, Run, "run", "give a loaded run, such as load('runs/mine')")


def load_run(
    folder: RunFolder, device: torch.device, checkpoint: CheckpointName = "best", *, base: Path | None = None
) -> Run:
    """Build the model with a run's weights, in evaluation mode, and return it with tokenizer and settings.

    An adapter is merged into the weights of its base, which is in the folder `base`, or None for where it was.

    Raises:
        UserError: the run has no weights, they do not fit into memory, or they are damaged or do not fit the settings;
            or the base of an adapter is not there or was altered.
    """
    chosen = folder.choose_weights(checkpoint)
    file = chosen.used.file
    model = with_weights(folder.build_model(base, draw=False), file)
    folder.check_adapter(file)
    if folder.config.lora is not None:
        merge_lora(model)
    return Run(model.to(device).eval(), folder.tokenizer, folder.config, path=folder.path, weights=chosen)


@checked_names
def load(
    path: Path | str, *, device: str = "auto", checkpoint: CheckpointName = "best", base: Path | str | None = None
) -> Run:
    """Load a run: its model, ready to use, its tokenizer and its config.

    An adapter (of `finetune` with `lora_rank`) is merged into the weights of its base.

    Args:
        path: folder of the run.
        device: auto, cuda, mps or cpu.
        checkpoint: the weights with the lowest validation loss (best), or those of the newest checkpoint (last).
        base: for an adapter, the folder of its base, or None for where it was. Its checksum must be the recorded one.

    Raises:
        UserError: it is not the folder of a run, it has no weights yet, its files are damaged, or the base of an
            adapter is not there or was altered.
    """
    folder = RunFolder.open(path)
    if base is not None and folder.config.lora is None:
        raise UserError(f"{folder.path} is a whole run, not an adapter; leave base out")
    base = None if base is None else as_path(base, "base", "give the folder of a run")
    return load_run(folder, choose_device(device), checkpoint, base=base)


@checked_names
def load_adapter(base: Run, path: Path | str, *, checkpoint: CheckpointName = "best") -> Run:
    """Load an adapter (of `finetune` with `lora_rank`) beside the weights of a base that is loaded already.

    The result is a run of its own, which shares the weights with the base (see `PackedLinear` for copies of them on x86
    processors). Its outputs are those of `load(path)`, up to rounding, and take somewhat longer.

    Args:
        base: the loaded base. It is not changed; the adapter must not outlive a change of its weights.
        path: folder of the adapter.
        checkpoint: as for `load`.

    Raises:
        UserError: it is not the folder of an adapter, the base is not the one that it was trained on, or for the
            reasons of `load`.
    """
    check_run(base)
    folder = RunFolder.open(path)
    if folder.config.lora is None:
        raise UserError(f"{folder.path} is a whole run, not an adapter; use load")
    if base.path is None or base.config.lora is not None:
        raise UserError(
            "the base is no whole run from a folder; give load(...) of the run that the adapter was made on"
        )
    base.model.check_plain("the base of an adapter")
    chosen = folder.choose_weights(checkpoint)
    model = folder.build_model(base.path, draw=False)
    load_weights(model, chosen.used.file)
    folder.check_adapter(chosen.used.file)
    model.requires_grad_(True)
    weights, own = base.model.state_dict(keep_vars=True), model.state_dict()
    shared = {name: weights[name.replace(".base_layer.", ".")] for name in own if ".lora_" not in name}
    if changed := [name for name, weight in shared.items() if not torch.equal(weight.to(own[name]), own[name])]:
        raise UserError(
            f"the base has other weights than {path} was trained on (at {changed[0]}): they changed since they were "
            "loaded, or are those of another checkpoint; load the base again"
        )
    model.load_state_dict(shared, strict=False, assign=True)
    like = next(base.model.parameters())
    return Run(model.to(like).eval(), folder.tokenizer, folder.config, path=folder.path, weights=chosen)


@checked_names
def save(run: Run, path: Path | str) -> Path:
    """Save a model with its tokenizer and config as the folder of a new run, which `load` and every command take.

    `load` returns the same weights, bit for bit. Training cannot resume from them: optimizer and memory are not saved.
    A loaded adapter is saved as the whole weights that it was merged into. The 8-bit weights of `to_int8` stay so.

    Args:
        run: what to save.
        path: the new folder.

    Returns:
        The folder.

    Raises:
        UserError: the path exists already, the file system refuses, or the weights have an adapter beside them
            (`load_adapter`).
    """
    check_run(run)
    run.model.check_without_adapter("saved")
    config, weights = run.config.without_adapter(), int8_tensors(run.model)
    return RunFolder.create(as_path(path, "path"), config, run.tokenizer, weights, run.memory_lengths).path


def weights_digest(run: Run, dtype: str) -> str:
    """Return the sha256 of weights, settings of the model and data type: a state fits only what it was computed with.

    Args:
        run: the run.
        dtype: data type of matrix products, resolved for the device.
    """
    digest = hashlib.sha256(f"{model_digest(run.config)} {dtype}".encode())
    for name, tensor in sorted(int8_tensors(run.model).items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
