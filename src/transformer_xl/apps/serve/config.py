"""Settings of the server. Their names are also the flags of `txl serve`."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator

from transformer_xl.config import INT32_MAX, Settings

_PLAIN_TEMPLATE = "{role}: {content}\n"


class ServerConfig(Settings):
    """Settings of the server; they are the flags of `txl serve`."""

    host: str = "127.0.0.1"
    """Address to listen on; others than this computer's own need an API key."""
    port: int = Field(default=8000, ge=0, le=65535)
    """Port to listen on; 0: any that is free."""
    allowed_host: tuple[str, ...] = ()
    """Name by which clients reach the server, as in the header Host, besides localhost; may be repeated."""
    api_key_file: str | None = None
    """File with an API key in each line; none: the key in the environment variable TXL_API_KEY, if it is set. Sessions
    belong to the key with which they were made."""
    max_batch: int = Field(default=64, ge=1, le=4096)
    """Number of sequences that are generated together."""
    max_waiting: int = Field(default=256, ge=1, le=INT32_MAX)
    """Number of prompts of each API key that may wait for their turn; more are refused with status 429."""
    memory_length: int | None = Field(default=None, ge=0, le=INT32_MAX)
    """Memory length in tokens of requests that name none; none: that with which the run is evaluated."""
    max_memory_length: int | None = Field(default=None, ge=0, le=INT32_MAX)
    """The longest memory that a request may ask for; none: memory_length."""
    max_tokens: int = Field(default=65_536, ge=1, le=INT32_MAX)
    """Number of tokens that a request may ask for, for each sample."""
    max_prompt_tokens: int = Field(default=2**20, ge=1, le=INT32_MAX)
    """Number of tokens that all prompts of a request may have together."""
    timeout: float = Field(default=600.0, gt=0, allow_inf_nan=False)
    """Seconds until a request must be done, waiting included."""
    sessions: str | None = None
    """Folder where sessions are saved, so that they survive a restart; none: they are kept in memory alone."""
    session_bytes: int = Field(default=2**30, ge=0, le=2**50)
    """Size of all sessions together in bytes; when there is no room, the least recently used
    of the key that has the most bytes are deleted."""
    chat_template: str | None = None
    """Text that each message of a chat becomes, such as '{role}: {content}\\n' (\\n is a line end); plain: that one.
    none: /v1/chat/completions is refused."""
    shutdown_seconds: int = Field(default=30, ge=0, le=3600)
    """Seconds that requests have to finish after SIGTERM or Ctrl-C."""
    dtype: Literal["auto", "float32", "bfloat16"] = "float32"
    """Data type of matrix products; auto: bfloat16 (faster, less exact) where the hardware supports it, else
    float32."""

    @field_validator("chat_template")
    @classmethod
    def _check_template(cls, value: str | None) -> str | None:
        if value == "plain":
            return _PLAIN_TEMPLATE
        if value is not None and value.count("{content}") != 1:
            raise ValueError("a chat template has {content} once, and may have {role}")
        return value and value.replace("\\n", "\n")  # as a shell passes it on
