"""Messages on unknown flags, with the flags that are probably meant."""

from __future__ import annotations

from collections.abc import Sequence
from difflib import get_close_matches

from transformer_xl.config import OTHER_NAMES

_EPOCHS = ("epochs", "num-train-epochs", "epoch", "num-epochs", "n-epochs")  # there is no flag for them


def unknown_flag(flag: str, known: Sequence[str]) -> str:
    """Return the message on an unknown flag, with the flags that may be meant, of all groups of settings.

    Args:
        flag: what was typed, such as `--lr`.
        known: the flags of the command, such as `--train.learning-rate`.
    """
    text, name = f"no option {flag}", flag.lstrip("-").split("=")[0].rpartition(".")[2].replace("_", "-").lower()
    if flag.split("=")[0] in known:
        return f"{flag} stands after --, which ends the options; write options before it"
    if name in _EPOCHS and "--train.max-steps" in known:
        return (
            f"{text}: training is counted in steps of batch_size * segment_length tokens; give --train.max-steps, or "
            "--train.max-epochs to limit it"
        )
    flags = [option for option in dict.fromkeys(known) if option.startswith("--") and "*" not in option]
    ends = {option: option.removeprefix("--").rpartition(".")[2] for option in flags}
    wanted = [name, OTHER_NAMES.get(name, "")]
    meant = [option for option in flags if ends[option] in wanted]
    group = flag.rpartition(".")[0]
    meant = [option for option in meant if group and option.startswith(f"{group}.")] or meant
    if not meant:  # a typing error; in the whole flag where its group was given
        typed = flag.split("=")[0]
        meant = get_close_matches(typed, flags, n=1) if "." in typed else []
        close = get_close_matches(name, ends.values(), n=1, cutoff=0.7)
        meant = meant or [option for option in flags if ends[option] in close]
    if not meant:  # the beginning of a flag
        meant = [option for option in flags if ends[option].startswith(name)]
    return f"{text}. Did you mean {' or '.join(meant[:3])}?" if meant else text
