"""How large a reproduction is: what can be typed, and the settings that all its systems share."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformer_xl.cli.flags import ModelFlags, TrainFlags, given
from transformer_xl.cli.options import num_cores, whole_numbers
from transformer_xl.config import TransformerXLConfig, UserError, load_recipe, merge, merge_recipe, run_settings

Groups = dict[str, dict[str, Any]]
"""Settings by group: model, train, evaluation."""

_SMOKE: Groups = {
    "model": {"n_layers": 2, "d_model": 32, "n_heads": 2, "d_head": 16, "d_ff": 64},
    "train": {"segment_length": 16, "memory_length": 16, "batch_size": 8, "max_steps": 30, "warmup_steps": 5, "eval_interval": 30,
              "eval_tokens": 1024, "checkpoint_interval": 10},
}  # fmt: skip
_USUAL_TOKENS, _SMOKE_TOKENS = 16_384, 512
_USUAL_SEEDS, _SMOKE_SEEDS = "1,2", "1"


@dataclass(frozen=True)
class Scale:
    """How large all of it is."""

    corpus: Path = Path("corpora/enwik8")
    """Folder that 'txl prepare' made."""
    out: Path = Path("reproduction")
    """Folder for runs, figures and the report; what is there already is not done again."""
    recipe: str = "ablation"
    """Settings that all systems share."""
    seeds: str | None = None
    """Each system is trained once for each. [default: 1,2; with --smoke 1]"""
    tokens: int | None = None
    """Tokens of the test text that are scored, from its start. [default: 16384; with --smoke 512]"""
    smoke: bool = False
    """Tiny models and a few steps: whether everything works, in minutes."""
    workers: int | None = None
    """Trainings at a time. [default: one for each core; on a GPU one]"""
    device: str = "auto"
    """auto, cuda, mps or cpu."""
    model: ModelFlags | None = None
    train: TrainFlags | None = None

    def all_seeds(self) -> tuple[int, ...]:
        """The seeds.

        Raises:
            UserError: other than different whole numbers.
        """
        given = self.seeds or (_SMOKE_SEEDS if self.smoke else _USUAL_SEEDS)
        seeds = whole_numbers("--seeds", given)
        if len(set(seeds)) < len(seeds):
            raise UserError(f"--seeds {given}: one is named twice, and would train the same run; name each once")
        return seeds

    def num_tokens(self, there_are: int) -> int:
        """How many tokens are scored.

        Raises:
            UserError: fewer than one.
        """
        wanted = (_SMOKE_TOKENS if self.smoke else _USUAL_TOKENS) if self.tokens is None else self.tokens
        if wanted < 1:
            raise UserError(f"--tokens {wanted}: wanted 1 or more")
        return min(wanted, there_are)

    def num_workers(self) -> int:
        """Trainings at a time.

        Raises:
            UserError: fewer than one, or no such device.
        """
        from transformer_xl.device import choose_device

        usual = num_cores() if choose_device(self.device).type == "cpu" else 1
        if self.workers is not None and self.workers < 1:
            raise UserError(f"--workers {self.workers}: wanted 1 or more")
        return self.workers or usual

    def base(self) -> Groups:
        """Settings that all systems share: the recipe with what was typed.

        Raises:
            UserError: settings that cannot be, or that differ from system to system.
        """
        flags = given(model=self.model, train=self.train)
        if "architecture" in flags.get("model", {}):
            raise UserError("model.architecture is what the systems differ in; leave it out")
        for name in ("seed", "loss"):
            if name in flags.get("train", {}):
                raise UserError(f"train.{name} is not one for all systems; leave it out (--seeds says the seeds)")
        known = merge_recipe(load_recipe(self.recipe), {})
        if self.smoke:
            known = merge(known, _SMOKE) | {"evaluation": dict[str, Any]()}
        base: Groups = merge(known, flags)
        config = run_settings(base, "settings")
        if not isinstance(config.model, TransformerXLConfig):
            raise UserError(f"recipe {self.recipe} is of {config.model.architecture}; give one of transformer-xl")
        if not config.train.memory_length:
            raise UserError("train.memory_length 0: recurrence is what is compared; give 1 or more")
        return base
