"""The folder of a run: settings, tokenizer, weights and metrics; all that using, repeating and resuming a run needs.

config.yaml            all settings, and the history of their changes
txl_tokenizer.json     the tokenizer
model.safetensors      the best weights: those with the lowest validation loss
metrics.jsonl          metrics of training and validation, one JSON object per line
starts.jsonl           where and by what each start and resumption of the training was run
trackers.json          where the run is in other programs, and up to which step (train.trackers)
checkpoints/step-N/    a checkpoint, from which training resumes:
  model.safetensors      the last weights
  training/              optimizer, memory, weight average and random state: one file per process
  training.json          the trainer's state, and the checksums of those files

A run that trains an adapter (LoRA) has adapter_model.safetensors in place of each model.safetensors, and
adapter_config.json for peft; the weights are those of its base, a run whose folder and checksum are in config.yaml.
"""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Callable, Mapping
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, get_args

import torch
import yaml
from torch import Tensor
from torch.overrides import TorchFunctionMode
from typing_extensions import override

from transformer_xl.architectures import build_model
from transformer_xl.checkpoint_record import (
    CheckpointName,
    CheckpointRecord,
    ChosenWeights,
    MemoryLengths,
    SavedWeights,
)
from transformer_xl.config import (
    RunConfig,
    UserError,
    check_settings,
    read_yaml,
    run_settings,
)
from transformer_xl.device import environment, require_memory
from transformer_xl.files import (
    as_path,
    as_user_error,
    atomic_folder,
    check_not_special,
    json_digest,
    parse_json,
    quoted,
    read_bytes,
    write_text,
)
from transformer_xl.inference.int8 import load_int8
from transformer_xl.model.language_model import LanguageModel
from transformer_xl.model.lora import (
    ADAPTER_FILE,
    PEFT_CONFIG_FILE,
    add_lora,
    check_lora,
    peft_config_text,
    refuse_pickled_adapter,
    state_names,
)
from transformer_xl.model.sizes import min_weight_bytes
from transformer_xl.tensor_file import (
    DAMAGED,
    SCALE,
    contents_digest,
    load_tensors,
    read_metadata,
    read_shapes,
    save_tensors,
)
from transformer_xl.text.token_store import Corpus
from transformer_xl.text.tokenizers import Tokenizer, describe_difference, fingerprint, load_tokenizer, save_tokenizer

HEAD = "score.weight"
"""Name of a classifier's own weights (`apps/classify`), which are in the file of the weights of its language model."""
CLASSIFIER_FILE = "classifier.json"
"""What a classifier's folder has besides: labels, pooling, validations."""


def check_new_run(path: Path) -> None:
    """Refuse the folder of a new run if it holds a run already.

    Raises:
        UserError: it does, or its name is not valid UTF-8.
    """
    try:
        str(path).encode()
    except UnicodeEncodeError:
        raise UserError(f"{str(path)!r} is not valid UTF-8, which safetensors needs; choose another") from None
    with as_user_error(f"writing {path}"):
        if (path / "config.yaml").exists():
            advice = f"resume it (txl train --resume {quoted(path)}), or choose another folder"
            with suppress(UserError):
                advice = RunFolder.open(path).advice_if_stopped_early() or advice
            raise UserError(f"{path} holds a run already; {advice}")


@dataclass(frozen=True)
class RunFolder:
    """The folder of a run, with its settings and tokenizer."""

    path: Path
    config: RunConfig
    tokenizer: Tokenizer

    @property
    def weights_name(self) -> str:
        """Name of the files of weights, in the folder and in its checkpoints."""
        return ADAPTER_FILE if self.config.lora else "model.safetensors"

    @staticmethod
    def create(
        path: Path,
        config: RunConfig,
        tokenizer: Tokenizer,
        weights: Mapping[str, Tensor] | None = None,
        memory_lengths: MemoryLengths | None = None,
        also: Callable[[Path], None] | None = None,
    ) -> RunFolder:
        """Create the folder of a new run.

        Args:
            path: the new folder.
            config: settings of the run.
            tokenizer: the tokenizer of its corpus.
            weights: tensors by name, or None if the run will be trained.
            memory_lengths: losses of these weights at several memory lengths, or None if these were not measured.
            also: writes further files, or None; it is given the folder while that has another name.

        Raises:
            UserError: the path exists already, or the file system refuses.
        """
        check_new_run(path)
        with atomic_folder(path) as temporary:
            (temporary / "config.yaml").write_text(config_text(config), encoding="utf-8")
            save_tokenizer(tokenizer, temporary / "txl_tokenizer.json")
            (temporary / "checkpoints").mkdir()
            if config.lora is not None:
                (temporary / PEFT_CONFIG_FILE).write_text(peft_config_text(config.lora), encoding="utf-8")
            if weights is not None:
                metadata = {
                    "step": "0",  # no training step of this run
                    "config_sha256": json_digest(config.model_dump(mode="json")),
                    "tokenizer_sha256": fingerprint(tokenizer),
                }
                if memory_lengths is not None:
                    metadata["memory_lengths"] = memory_lengths.model_dump_json()
                save_tensors(temporary / "model.safetensors", weights, metadata)
            if also is not None:
                also(temporary)
        return RunFolder(path, config, tokenizer)

    @staticmethod
    def open(path: Path | str) -> RunFolder:
        """Open a run and read its settings and tokenizer.

        Raises:
            UserError: the path is not the folder of a run, or its files are damaged.
        """
        path = as_path(path, "run", "give the folder of a run")
        config = read_config(path)
        tokenizer = load_tokenizer(path / "txl_tokenizer.json")
        if config.corpus and config.corpus.tokenizer_sha256 != fingerprint(tokenizer):
            raise UserError(f"{path / 'txl_tokenizer.json'} is not the one this run was trained with; copy it again")
        return RunFolder(path, config, tokenizer)

    def open_corpus(self, path: Path | str | None = None) -> Corpus:
        """Open the corpus the run was trained on, or another one with the same tokenizer.

        Args:
            path: folder of the other corpus, or None for the run's corpus.

        Raises:
            UserError: the corpus does not exist, or its tokenizer is not that of the run.
        """
        if path is None:
            if self.config.corpus is None:
                raise UserError(f"{self.path} does not record its corpus; pass corpus=DIR")
            path = Path(self.config.corpus.path)
            if not path.exists():
                raise UserError(f"the corpus of this run, {path}, no longer exists; pass corpus=DIR")
        corpus = Corpus.open(path)
        if difference := describe_difference(corpus.tokenizer, self.tokenizer):
            raise UserError(
                f"{path} has another tokenizer than {self.path} ({difference}); prepare it with the "
                f"run's: txl prepare FILES --tokenizer {quoted(self.path)}"
            )
        return corpus

    def save_weights(self, weights: Mapping[str, Tensor], *, step: int, nats: float | None) -> None:
        """Write the run's best weights.

        Args:
            weights: tensors by name.
            step: number of training steps after which the model had these weights.
            nats: validation loss of the weights in nats per token, or None if unknown.

        Raises:
            UserError: the file system refuses; the previous weights are unchanged.
        """
        metadata = {"step": str(step), "model_sha256": model_digest(self.config)}
        metadata["tokenizer_sha256"] = fingerprint(self.tokenizer)
        if (adapter := adapter_digest(self.config)) is not None:
            metadata["adapter_sha256"] = adapter
        if nats is not None:
            metadata["nats_per_token"] = repr(nats)
        save_tensors(self.path / self.weights_name, weights, metadata)

    def save_memory_lengths(self, memory_lengths: MemoryLengths) -> None:
        """Add losses at several memory lengths to the best weights, for which they were measured.

        Raises:
            UserError: the file is damaged, or the file system refuses; the file is unchanged.
        """
        best = self.path / self.weights_name
        weights, metadata = load_tensors(best)
        entry = memory_lengths.model_dump_json()
        if metadata.get("memory_lengths") != entry:
            save_tensors(best, weights, {**metadata, "memory_lengths": entry})

    def best_known(self) -> tuple[int, float] | None:
        """Return the step and the validation loss (nats per token) of the best weights, or None if unknown.

        Raises:
            UserError: the file is damaged.
        """
        if not (self.path / self.weights_name).is_file():
            return None
        load_tensors(self.path / self.weights_name)  # which compares the checksum
        best = self._best_weights()
        return None if best is None or best.valid_nats_per_token is None else (best.step, best.valid_nats_per_token)

    def best_step(self) -> int | None:
        """Return the step of the best weights, or None if they do not exist."""
        best = self._best_weights()
        return None if best is None else best.step

    def choose_weights(self, checkpoint: CheckpointName = "best") -> ChosenWeights:
        """Choose the best weights, or the last ones.

        The loss stored in model.safetensors decides which are the best. Without one (no validation text), the weights
        of the newest checkpoint are the best unless the run averages its weights: only model.safetensors has those.

        Raises:
            UserError: the run has no weights yet, the best ones are missing, or `checkpoint` is neither best nor last.
        """
        if checkpoint not in get_args(CheckpointName):
            known = " and ".join(get_args(CheckpointName))
            raise UserError(f"no checkpoint {checkpoint!r}; available: {known}")
        best, newest = self._best_weights(), self.latest_checkpoint()
        if newest is None:
            if best is None:
                advice = self.advice_if_stopped_early() or f"train it: txl train --resume {quoted(self.path)}"
                raise UserError(f"{self.path} has no weights yet; {advice}")
            if checkpoint == "last":
                raise UserError(f"{self.path} has no checkpoint, only its best weights; use checkpoint=best")
            return ChosenWeights(best)
        last = self._last_weights(newest)
        if checkpoint == "best" and best is None and CheckpointRecord.read(newest).state.get("best_nats") is not None:
            raise UserError(
                f"{self.path / self.weights_name}, the best weights, is missing; copy it again, or use the last ones "
                "with checkpoint=last"
            )
        averaged = self.config.train.weight_average != "none"
        # the same weights, unless training went back and came to the same step by another way
        is_same = best is not None and last.valid_nats_per_token in (None, best.valid_nats_per_token)
        if best is not None and best.step == last.step and is_same and not averaged:
            last = replace(last, memory_lengths=best.memory_lengths)
        if best is not None and best.valid_nats_per_token is None and not averaged:
            best = None
        if best is None:
            return ChosenWeights(last)
        return ChosenWeights(best, (last,)) if checkpoint == "best" else ChosenWeights(last, (best,))

    def _best_weights(self) -> SavedWeights | None:
        """Describe the file of the best weights, or return None if it does not exist."""
        file = self.path / self.weights_name
        if not file.exists():
            if self.config.lora is not None:
                refuse_pickled_adapter(self.path)
            return None
        metadata = read_metadata(file)
        if "nats_per_token" not in metadata:
            load_tensors(file)  # whether the loss is missing decides which weights are used, so verify the checksum
        nats = metadata.get("nats_per_token")
        try:
            step, loss = int(metadata.get("step", 0)), None if nats is None else float(nats)
            entry = metadata.get("memory_lengths")
            lengths = None if entry is None else check_settings(MemoryLengths, parse_json(entry), str(file))
        except ValueError as error:
            raise UserError(DAMAGED.format(file, error)) from None
        return SavedWeights("best", file, step, loss, is_validated=loss is not None, memory_lengths=lengths)

    def _last_weights(self, newest: Path) -> SavedWeights:
        """Describe the weights of the newest checkpoint."""
        step, state = int(newest.name.removeprefix("step-")), dict[str, Any]()
        with suppress(UserError):  # a damaged record must not keep the weights from being used
            state = CheckpointRecord.read(newest).state
        is_validated = state.get("validation_step") == step
        # the loss of a step is that of the weight average, if the run has one, and not that of the last weights
        is_known = is_validated and self.config.train.weight_average == "none"
        nats = state.get("validation_nats") if is_known else None
        nats = nats if isinstance(nats, int | float) else None
        return SavedWeights("last", newest / self.weights_name, step, nats, is_validated=is_validated)

    def checkpoints(self) -> list[Path]:
        """Return the folders of the checkpoints that training can resume from, oldest first."""
        return list_checkpoints(self.path)

    def latest_checkpoint(self) -> Path | None:
        """Return the folder of the newest checkpoint, or None if the run has none."""
        return next(reversed(self.checkpoints()), None)

    def advice_if_stopped_early(self) -> str | None:
        """Return what to do with a run of fine-tuning that was stopped before its first checkpoint, or None."""
        has_weights = (self.path / self.weights_name).exists() or self.latest_checkpoint() is not None
        if self.config.finetune is None or has_weights:
            return None
        return "it was stopped before its first checkpoint: remove the folder and fine-tune anew"

    def metrics(self) -> list[dict[str, Any]]:
        """Return the lines of metrics.jsonl (`read_metrics`)."""
        return read_metrics(self.path)

    def record_start(self, step: int, device: torch.device, processes: int) -> None:
        """Append a line to starts.jsonl: when, where and by what training begins or goes on.

        Raises:
            UserError: the file system refuses.
        """
        file, date = self.path / "starts.jsonl", datetime.now(UTC).isoformat(timespec="seconds")
        command = shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]])
        line = {"date": date, "step": step, "command": command, "processes": processes, **environment(device)}
        with as_user_error(f"writing {file}"), file.open("a", encoding="utf-8") as stream:
            is_cut = read_bytes(file)[-1:] not in (b"", b"\n")  # the disk was full at the last start
            stream.write("\n" * is_cut + json.dumps(line) + "\n")

    def write_config(self) -> None:
        """Write config.yaml, if it has other settings.

        Raises:
            UserError: the file system refuses; the file is unchanged.
        """
        file, text = self.path / "config.yaml", config_text(self.config)
        if not file.exists() or read_bytes(file) != text.encode():
            write_text(file, text)

    def verify(self) -> list[str]:
        """Read all weights and checkpoints, verify their checksums, and check that they fit the settings.

        config.yaml is compared with the settings in the newest checkpoint. If there is none, it is compared with its
        checksum in model.safetensors, which in a trained run is one of the model settings alone.

        Returns:
            Sentences about what has no checksum in the folder, or is out of date.

        Raises:
            UserError: a file is missing, damaged or of another model.
        """
        notes = self._verify_config()
        model = self.build_model(draw=False)
        if (best := self.path / self.weights_name).exists():
            with_weights(model, best)
        for checkpoint in self.checkpoints():
            load_weights(model, checkpoint / self.weights_name)
            CheckpointRecord.read(checkpoint).verify(checkpoint)
        return notes

    def _verify_config(self) -> list[str]:
        """Compare config.yaml and txl_tokenizer.json with what checkpoints and weights record of them."""
        file, best, trained = self.path / "config.yaml", self.path / self.weights_name, None
        if newest := self.latest_checkpoint():
            trained = trained_config(newest)
        if trained is not None and self.config not in (trained, trained.before_last_change()):
            difference = first_difference(self.config.model_dump(mode="json"), trained.model_dump(mode="json"))
            raise UserError(
                f"{file} differs from the settings in {self.latest_checkpoint()}: {difference}; restore it, or let "
                f"'txl train --resume {quoted(self.path)}' write it again"
            )
        metadata = load_tensors(best)[1] if best.exists() else {}
        for name, path, expected in (
            ("config_sha256", file, json_digest(read_yaml(read_bytes(file), str(file)))),
            ("model_sha256", file, model_digest(self.config)),
            ("adapter_sha256", file, adapter_digest(self.config)),
            ("tokenizer_sha256", self.path / "txl_tokenizer.json", fingerprint(self.tokenizer)),
        ):
            if metadata.get(name, expected) != expected:
                raise UserError(f"{path} is not the one that {best} was saved with; copy the whole run again")
        if "config_sha256" in metadata:
            return []
        if trained is None:
            what = "the train and evaluation settings in config.yaml" if "model_sha256" in metadata else "config.yaml"
            return [f"there is none of {what}"]
        # the run was killed, or the disk was full, after the checkpoint and before config.yaml was written
        return [] if self.config == trained else ["config.yaml lacks the last change, which resuming writes"]

    def build_model(self, base: Path | None = None, *, draw: bool = True) -> LanguageModel:
        """Build the model in host memory with initial weights, or with those of its base and a new adapter.

        Args:
            base: the folder of the base, or None for where it was when the run was made.
            draw: whether initial weights are drawn; otherwise they are arbitrary, for a caller who loads others.

        Raises:
            UserError: the weights certainly need more memory than there is, the base is not there or is not the one of
                the run, or for a reason that `build_model` or `add_lora` lists.
        """
        model = build_checked(self.config, draw=draw)
        if self.config.lora is not None:
            check_lora(model, self.config.lora)
            load_weights(model, self._base_file(base))
            add_lora(model, self.config.lora)
        return model

    def _base_file(self, base: Path | None) -> Path:
        """Return the file with the weights that the run's adapter belongs to.

        Without `base` it is looked for where it was, and beside this run under the same name.

        Raises:
            UserError: it is not there, or its checksum is another.
        """
        finetune = self.config.finetune
        assert finetune is not None
        folders = [base] if base is not None else [Path(finetune.base), self.path.parent / Path(finetune.base).name]
        names = "model.safetensors", f"checkpoints/step-{finetune.base_step:08}/model.safetensors"
        files = [folder / name for folder in folders for name in names]
        with as_user_error("reading the base"):
            files = [file for file in files if file.is_file()]
            for file in files:
                if contents_digest(file) == finetune.base_sha256:
                    return file
        if files:
            raise UserError(
                f"{files[0]} is not what {self.path} was trained on: its checksum is another; restore those weights "
                f"(of step {finetune.base_step:,}), or train a new adapter"
            )
        raise UserError(
            f"{self.path} is an adapter of {folders[0]}, which is no run here; give the base's new folder: "
            f"txl train --resume {quoted(self.path)} --base DIR, or txl convert {quoted(self.path)} RUN --base DIR"
        )

    def check_adapter(self, file: Path) -> None:
        """Check that config.yaml has the base and the settings that the adapter in a file was trained with.

        Raises:
            UserError: it has others, or the file is damaged.
        """
        expected = adapter_digest(self.config)
        if expected is not None and read_metadata(file).get("adapter_sha256", expected) != expected:
            raise UserError(
                f"{file} was trained with another base, rank, alpha or targets than those in "
                f"{self.path / 'config.yaml'}; restore that file"
            )


def read_config(path: Path) -> RunConfig:
    """Return the settings in the folder of a run.

    Raises:
        UserError: the path is not the folder of a run, or config.yaml is damaged.
    """
    settings = path / "config.yaml"
    with as_user_error(f"reading {path}"):
        if not settings.is_file():
            refuse_pickled_adapter(path)
            problem = "not the folder of a run (no config.yaml)" if path.exists() else "no such folder"
            raise UserError(f"{path}: {problem}; expected a folder made by 'txl train --run DIR' or 'txl convert'")
    with as_user_error(f"reading {settings}"):
        values = read_yaml(settings.read_bytes(), str(settings))
    return run_settings(values, str(settings))


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Return the lines of metrics.jsonl in the folder of a run; an incomplete last line (of a killed run) is skipped.

    Raises:
        UserError: the file is damaged.
    """
    file = path / "metrics.jsonl"
    if not file.exists():
        return []
    check_not_special(file)
    lines = read_bytes(file).splitlines(keepends=True)
    try:
        entries = [parse_json(line) for line in lines if line.endswith(b"\n")]
        for line in entries:
            if not (isinstance(line["split"], str) and isinstance(line["step"], int)):
                raise ValueError(f"no split or step in {line}")
            if not isinstance(line["nats_per_token"], int | float):
                raise ValueError(f"the loss {line['nats_per_token']!r} is no number")
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{file} is damaged ({error}); delete it: the metrics are not needed to resume") from None
    return entries


def read_last_start(path: Path) -> dict[str, Any] | None:
    """Return the last line of starts.jsonl in the folder of a run; None if there is none, as in those of 0.1, or it was
    cut off."""
    file = path / "starts.jsonl"
    with suppress(ValueError, IndexError):
        check_not_special(file)
        return parse_json(read_bytes(file).splitlines()[-1]) if file.exists() else None
    return None


def list_checkpoints(path: Path) -> list[Path]:
    """Return the folders of the checkpoints in the folder of a run, oldest first."""
    folders = (path / "checkpoints").glob("step-*")
    numbered = [folder for folder in folders if folder.name.removeprefix("step-").isdecimal()]
    return sorted(numbered, key=lambda folder: int(folder.name.removeprefix("step-")))


def build_checked(config: RunConfig, *, draw: bool = True) -> LanguageModel:
    """Build the model of a run in host memory, with initial weights, or with arbitrary ones unless they are drawn.

    Raises:
        UserError: the weights certainly need more memory than there is; or a reason that `build_model` lists.
    """
    advice = "use a machine with more memory, or a smaller model"
    require_memory("the model", min_weight_bytes(config.model), torch.device("cpu"), advice)
    with nullcontext() if draw else _WithoutDraws():
        return build_model(config.model, memory_length=config.train.memory_length)


class _WithoutDraws(TorchFunctionMode):
    """Leaves out the functions of torch.nn.init. (On the meta device, torch would load 140 MB of Python modules.)"""

    @override
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__module__", "") == "torch.nn.init":
            return args[0] if args else kwargs["tensor"]
        return func(*args, **(kwargs or {}))


def load_weights(model: LanguageModel, file: Path) -> None:
    """Load the weights of a file into a model.

    Raises:
        UserError: the file is damaged, or its weights are of another model.
    """
    # of a model with an adapter, the file has the adapter
    model.load_state_dict(read_weights(model, file), strict=False)


def with_weights(model: LanguageModel, file: Path) -> LanguageModel:
    """Return a model with the weights of a file: itself, or a copy if they are of 8 bits.

    Raises:
        UserError: for the reasons of `load_weights` and `load_int8`.
    """
    if any(name.endswith(SCALE) for name in read_shapes(file)):
        return load_int8(model, file)
    load_weights(model, file)
    return model


def read_weights(model: LanguageModel, file: Path) -> dict[str, Tensor]:
    """Return the weights in a file, by their names in the state dict, if they fit a model.

    Those of a model with an adapter are the adapter's, and a classifier's (`HEAD`) are left out unless the model has
    them. Names and shapes are compared before anything is allocated.

    Raises:
        UserError: the file is damaged, its weights are of another model, or those of an adapter are not finite.
    """
    names, state = state_names(model), model.state_dict()
    expected = {(saved, tuple(state[name].shape)) for saved, name in names.items()}
    found = {(name, shape) for name, shape in read_shapes(file).items() if name != HEAD or name in names}
    if any(name.endswith(SCALE) for name, _ in found):
        raise UserError(f"{file} has 8-bit weights, which are for inference; take the run that they were made of")
    if mismatched := expected ^ found:
        name, _ = min(mismatched)
        raise UserError(f"{file} does not fit the settings in config.yaml (at {name}); copy the whole run again")
    tensors, _ = load_tensors(file)
    for saved, tensor in tensors.items():
        if not tensor.is_floating_point():
            raise UserError(f"{file} has weights of {tensor.dtype} (at {saved}); expected floating point")
        if file.name == ADAPTER_FILE and not tensor.isfinite().all():
            raise UserError(f"{file} has weights that are not finite (at {saved}); train the adapter anew")
    return {name: tensors[saved] for saved, name in names.items()}


def model_digest(config: RunConfig) -> str:
    """Return the sha256 of the settings that determine what a model computes."""
    values = config.model.flat()
    values.pop("attn_implementation", None)
    for name in ("value_embeddings", "key_offset", "attention_sinks"):  # which earlier versions did not have
        if not values.get(name):
            values.pop(name, None)
    return json_digest(values)


def adapter_digest(config: RunConfig) -> str | None:
    """Return the sha256 of the base and the settings of an adapter, or None if the run is no adapter."""
    if config.finetune is None or config.finetune.lora is None:
        return None
    return json_digest({"base": config.finetune.base_sha256, "lora": config.finetune.lora.model_dump(mode="json")})


def first_difference(actual: Mapping[str, Any], expected: Mapping[str, Any], prefix: str = "") -> str:
    """Describe the first setting that differs, such as `train.beta2 is 0.9, not 0.999`; empty if none does.

    A setting that is missing is like one that is None.
    """
    for name in [*expected, *actual]:
        value, other = actual.get(name), expected.get(name)
        if isinstance(value, Mapping) and isinstance(other, Mapping):
            if difference := first_difference(value, other, f"{prefix}{name}."):
                return difference
        elif value != other:
            return f"{prefix}{name} is {value}, not {other}"
    return ""


def trained_config(checkpoint: Path) -> RunConfig | None:
    """Return the settings that training had when it wrote a checkpoint, or None in one of an earlier version.

    config.yaml can differ if it was edited, or if the run was killed between writing the two files.

    Raises:
        UserError: the checkpoint is damaged.
    """
    config = CheckpointRecord.read(checkpoint).config
    return None if config is None else run_settings(config, str(checkpoint))


def config_text(config: RunConfig) -> str:
    """Return the settings as YAML."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False)
