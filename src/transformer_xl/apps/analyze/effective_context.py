"""Relative effective context length (RECL): how far back text still helps each of several models (paper section 4.4).

`txl analyze context` and `txl reproduce context` measure it. l_i(c, t) is model i's loss of token t when it sees the c
tokens before it and nothing else. With c' = c + step:

    b(c, t)    = min over the models of l_i(c, t), the baseline
    T(r, c)    = the fraction r of the positions with the largest b(c, t), chosen anew for each c
    f_i(c, c') = mean over T(r, c) of min(b(c, t), l_i(c', t))
    g_i(c, c') = (exp f_i(c, c) - exp f_i(c, c')) / exp f_i(c, c), the gain

Starting at a short c, c grows by one step while g_i is at or above a threshold; the first c with a smaller gain is the
effective length. It is relative because a model gains only where it improves on the best of the group: a model that
uses a short context badly gains nothing by catching up. Where the paper leaves it open: the number of chosen positions
is r times all of them, rounded, at least one; of equal losses, the one earlier in the text counts as larger.

Shape suffixes: I models, C context lengths, P positions in the text, B batch size, T new tokens, S tokens of a context
and its target, D model width, K tokens of the text.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch

from transformer_xl.apps.analyze.analysis_config import ContextSweep
from transformer_xl.checkpoint_record import ChosenWeights
from transformer_xl.config import EvaluationConfig, UserError, check_settings
from transformer_xl.device import choose_device
from transformer_xl.evaluation.evaluate import check_weights
from transformer_xl.evaluation.plan import EvaluationPlan, ProgressCallback
from transformer_xl.evaluation.with_memory import memory_slots
from transformer_xl.inference import InferenceModel, prepare_inference, require_reading_memory
from transformer_xl.model.language_model import LanguageModel
from transformer_xl.model.memory import Memory
from transformer_xl.run import load_run
from transformer_xl.run_folder import RunFolder
from transformer_xl.text.token_store import Tokens
from transformer_xl.text.tokenizers import describe_difference

_TOKENS_PER_STEP = 4096  # new tokens in one call of the model, over the whole batch: enough to keep the device busy
_MEMORY_BYTES = 2**29  # maximum size of the memory of one batch

Losses = npt.NDArray[np.float64]

FRACTIONS = (0.1, 0.5, 1.0)
"""The paper's r: fractions of the positions, those that are hardest to predict, over which losses are averaged."""


def draw_positions(sweep: ContextSweep, num_tokens: int) -> npt.NDArray[np.int64]:
    """Draw the positions t whose tokens are predicted, without replacement, in ascending order; shape (P,).

    Raises:
        UserError: too few positions of a text of `num_tokens` tokens have the longest context before them.
    """
    available = max(0, num_tokens - sweep.longest)
    if sweep.num_positions > available:
        raise UserError(
            f"the text has {num_tokens:,} tokens, of which {available:,} have {sweep.longest:,} before them, and "
            f"num_positions is {sweep.num_positions:,}; give a smaller num_positions or max_context, or a longer text"
        )
    drawn_P = np.random.default_rng(sweep.seed).choice(available, sweep.num_positions, replace=False)
    return np.sort(drawn_P).astype(np.int64) + sweep.longest


@dataclass(frozen=True, eq=False)
class GroupModel:
    """A model of the group, and how it processes its context."""

    name: str
    model: LanguageModel
    plan: EvaluationPlan
    """Only segment length, context limits, softmax temperature, dtype and batch size are used."""
    weights: ChosenWeights | None = None
    """Which weights of its run the model has, if it is of a run."""

    @cached_property
    def _inference(self) -> InferenceModel:
        return prepare_inference(self.model, self.plan.dtype)

    @property
    def max_visible_tokens(self) -> int | None:
        """Maximum number of tokens before the predicted one that this model can see, or None if it has memory.

        A model without memory sees those of its segment, and of the extended context.
        """
        return None if self.plan.context_limits.memory_length else self.plan.num_inputs

    def num_inputs(self, context: int) -> int:
        """Return how many tokens the model processes when it may see `context` of them."""
        return min(context, self.max_visible_tokens or context)

    def cost(self, sweep: ContextSweep) -> int:
        """Return how many tokens the model processes for the whole sweep."""
        return sweep.num_positions * sum(self.num_inputs(context) for context in sweep.contexts)

    def losses(
        self,
        tokens_K: Tokens,
        positions_P: npt.NDArray[np.int64],
        context: int,
        progress: ProgressCallback | None = None,
    ) -> Losses:
        """Return l_i(c, t) in nats: the loss of each target token given only the `context` tokens before it; (P,).

        Every position starts from an empty memory. The context ends with a whole segment, so that the target follows
        the segment's last position, which sees the most tokens; the first segment takes the remainder.

        Args:
            tokens_K: the text.
            positions_P: positions of the targets; each has at least `context` tokens before it.
            context: c, in tokens.
            progress: called with the number of tokens processed since the last call.
        """
        model, segment_length, num_inputs = self._inference, self.plan.num_inputs, self.num_inputs(context)
        lengths = [(num_inputs - 1) % segment_length + 1] + [segment_length] * ((num_inputs - 1) // segment_length)
        losses: list[torch.Tensor] = []
        for positions_B in np.array_split(positions_P, -(-len(positions_P) // self._batch_size(num_inputs))):
            tokens_BS = torch.from_numpy(tokens_K[positions_B[:, None] + np.arange(-num_inputs, 1)].astype(np.int64))
            segments = tokens_BS[:, :-1].to(model.device).split(lengths, dim=1)
            hidden_BTD, memory = model(segments[0], self._empty_memory(len(positions_B), num_inputs))
            for tokens_BT in segments[1:]:
                hidden_BTD, memory = model(tokens_BT, memory)
            nats_B1 = model.nats(hidden_BTD[:, -1:], tokens_BS[:, -1:], temperature=self.plan.softmax_temperature)
            losses.append(nats_B1.flatten())
            if progress:
                progress(len(positions_B) * num_inputs)
        return torch.cat(losses).cpu().double().numpy()

    def _empty_memory(self, batch_size: int, num_inputs: int) -> Memory:
        """Return an empty memory with the plan's limits, but no more slots than `num_inputs` tokens can fill."""
        model, plan = self._inference, self.plan
        num_slots, advice = memory_slots(model, num_inputs, plan), "lower max_context or memory_length"
        require_reading_memory(model, "the analysis", num_rows=batch_size, num_slots=num_slots, advice=advice)
        return model.initial_memory(batch_size, replace(plan.context_limits, memory_length=num_slots))

    def _batch_size(self, num_inputs: int) -> int:
        """Return B: the number of positions computed at once when each has `num_inputs` inputs."""
        if self.plan.batch_size is not None:
            return self.plan.batch_size
        memory_bytes = sum(tensor.nbytes for tensor in self._empty_memory(1, num_inputs).tensors().values())
        return max(1, min(_TOKENS_PER_STEP // min(self.plan.segment_length, num_inputs), _MEMORY_BYTES // memory_bytes))


@dataclass(frozen=True, eq=False)
class Gains:
    """The gain of each context over the next longer one, at one fraction r of the positions.

    C counts all contexts but the longest, which has no longer one to compare with.
    """

    num_positions: int
    """Number of chosen positions, the size of T(r, c)."""
    baseline_C: Losses
    """f_i(c, c), which is the same for every model i: the mean of b(c, t) over the chosen positions, in nats."""
    further_IC: Losses
    """f_i(c, c'), in nats."""
    gains_IC: Losses
    """g_i(c, c'), never below 0."""

    @staticmethod
    def compute(losses_ICP: Losses, fraction: float) -> Gains:
        """Compute the gains from the losses of all models, contexts and positions."""
        best_CP = losses_ICP.min(axis=0)
        num_contexts, num_positions = best_CP.shape
        num_chosen = max(1, int(fraction * num_positions + 0.5))
        hardest_CP = np.argsort(-best_CP, axis=1, kind="stable")
        baseline_C = np.empty(num_contexts - 1)
        further_IC = np.empty((len(losses_ICP), num_contexts - 1))
        for index in range(num_contexts - 1):
            chosen_P = hardest_CP[index, :num_chosen]
            best_P = best_CP[index, chosen_P]
            baseline_C[index] = best_P.mean()
            further_IC[:, index] = np.minimum(best_P, losses_ICP[:, index + 1].take(chosen_P, axis=1)).mean(axis=-1)
        # (exp f - exp f') / exp f, without exponentials that could overflow
        return Gains(num_chosen, baseline_C, further_IC, 0.0 - np.expm1(further_IC - baseline_C))


def context_results(
    sweep: ContextSweep,
    models: Sequence[GroupModel],
    positions_P: npt.NDArray[np.int64],
    losses_ICP: Losses,
    seconds_I: Sequence[float],
) -> dict[str, Any]:
    """Return gains and effective lengths as plain values, for JSON.

    Args:
        sweep: contexts and threshold.
        models: the models of the group.
        positions_P: positions of the targets.
        losses_ICP: l_i(c, t) of all models, contexts and positions, in nats.
        seconds_I: time that each model took, in seconds.
    """
    by_fraction = {f"{fraction:g}": Gains.compute(losses_ICP, fraction) for fraction in FRACTIONS}
    return {
        "contexts": list(sweep.contexts),
        "context_step": sweep.context_step,
        "threshold": sweep.threshold,
        "seed": sweep.seed,
        "positions": positions_P.tolist(),
        "baseline": {
            fraction: {"num_positions": gains.num_positions, "nats_per_token": gains.baseline_C.tolist()}
            for fraction, gains in by_fraction.items()
        },
        "models": [
            {
                "name": model.name,
                **(model.weights.as_dict() if model.weights else {}),
                "parameters": model.model.num_parameters(),
                "segment_length": model.plan.segment_length,
                **asdict(model.plan.context_limits),
                "max_visible_tokens": model.max_visible_tokens,
                "tokens_read": model.cost(sweep),
                "seconds": seconds_I[index],
                "nats_per_token": losses_ICP[index].mean(axis=-1).tolist(),
                "fractions": {
                    fraction: {
                        **_effective_length(sweep, model, gains.gains_IC[index]),
                        "further_nats_per_token": gains.further_IC[index].tolist(),
                        "gains": gains.gains_IC[index].tolist(),
                    }
                    for fraction, gains in by_fraction.items()
                },
            }
            for index, model in enumerate(models)
        ],
    }


def _effective_length(sweep: ContextSweep, model: GroupModel, gains_C: Losses) -> dict[str, Any]:
    """Return the effective length, and whether it is exact; if no gain is below the threshold, it may be longer."""
    for context, gain in zip(sweep.contexts, gains_C, strict=False):
        if gain < sweep.threshold:
            return {"effective_context_tokens": model.num_inputs(context), "fell_below_threshold": True}
    return {"effective_context_tokens": sweep.contexts[-1], "fell_below_threshold": False}


def format_length(result: Mapping[str, Any]) -> str:
    """Return an effective length for a table, from an entry of `fractions` in the results of `measure_context`."""
    return f"{'' if result['fell_below_threshold'] else '>= '}{result['effective_context_tokens']:,}"


def load_group(
    runs: Mapping[str, Path],
    *,
    memory_length: int | None = None,
    attention_window: int | Literal["none"] | None = None,
    clamp_length: int | Literal["none"] | None = None,
    device: str = "auto",
) -> list[GroupModel]:
    """Load the models of a group, each with its run's evaluation settings, except for those given here.

    Settings that a model does not have are ignored for that model.

    Args:
        runs: run folders by the name of the model.
        memory_length: memory slots, in tokens.
        attention_window: maximum number of keys that a query sees, itself included; none: no limit.
        clamp_length: distances above this are treated as this one; none: no limit.
        device: cuda, mps, cpu, or auto for the fastest of these that is available.

    Raises:
        UserError: a run or the device does not exist, a number is out of range, or the runs' tokenizers differ.
    """
    folders = {name: RunFolder.open(path) for name, path in runs.items()}
    first = next(iter(folders.values()))
    for folder in folders.values():
        if difference := describe_difference(folder.tokenizer, first.tokenizer):
            raise UserError(
                f"{folder.path} has another tokenizer than {first.path} ({difference}); give runs with the same "
                "tokenizer"
            )
    models: list[GroupModel] = []
    for name, folder in folders.items():
        settings: dict[str, Any] = {}
        if folder.config.model.has_memory:
            settings["memory_length"] = memory_length
        if folder.config.model.attention_kernel is not None:
            settings |= {"attention_window": attention_window, "clamp_length": clamp_length}
        limits = {key: None if value == "none" else value for key, value in settings.items() if value is not None}
        config = check_settings(EvaluationConfig, limits, "context limits")
        run = load_run(folder, choose_device(device))
        models.append(GroupModel(name, run.model, EvaluationPlan.resolve(folder.config, config), run.weights))
    return models


def measure_context(
    models: Sequence[GroupModel], tokens_K: Tokens, sweep: ContextSweep, progress: ProgressCallback | None = None
) -> dict[str, Any]:
    """Measure the relative effective context length of each model of a group, at the same positions of one text.

    All contexts are computed, even those beyond the effective length, because the plot of gains needs them.

    Args:
        models: the models of the group, in evaluation mode; they share one vocabulary.
        tokens_K: the text.
        sweep: contexts, number of positions, fractions and threshold.
        progress: called with the number of tokens processed since the last call, by all models together.

    Raises:
        UserError: the text is too short, weights are not finite, or a model does not have the context limits of its
            plan.
    """
    positions_P = draw_positions(sweep, len(tokens_K))
    for model in models:
        check_weights(model.model)
    losses_ICP, seconds = np.empty((len(models), len(sweep.contexts), len(positions_P))), list[float]()
    for losses_CP, model in zip(losses_ICP, models, strict=True):
        start = time.perf_counter()
        for losses_P, context in zip(losses_CP, sweep.contexts, strict=True):
            losses_P[:] = model.losses(tokens_K, positions_P, context, progress)
        seconds.append(time.perf_counter() - start)
    return context_results(sweep, models, positions_P, losses_ICP, seconds)
