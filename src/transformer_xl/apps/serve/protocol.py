"""The bodies of requests, as in OpenAI's API, and the errors of that API.

Unknown fields are refused by name; fields of OpenAI's API that this server does not support are accepted with the value
that changes nothing.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

MAX_STOPS = 16
MAX_STOP_CHARACTERS = 1000
MAX_LOGPROBS = 20

_MAX_FIELDS = 100  # of a body

Seed = Annotated[int, Field(ge=0, lt=2**63)]
# the lists end at the first wrong value: an error for each of a million values takes gigabytes
TokenIds = Annotated[list[Annotated[int, Field(ge=0, lt=2**31)]], Field(fail_fast=True)]
StopString = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARACTERS)]
Stop = StopString | Annotated[list[StopString], Field(max_length=MAX_STOPS, fail_fast=True)]


class ApiError(Exception):
    """An error that is answered in OpenAI's form."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code, self.headers = status, message, param, code, headers

    def body(self) -> dict[str, Any]:
        """Return the answer as JSON values."""
        kinds = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 409: "conflict_error"}
        kind = kinds.get(self.status) or ("invalid_request_error" if self.status < 500 else "server_error")
        if self.status == 429:
            kind = "rate_limit_error"
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


class Body(BaseModel):
    """Base class of request bodies: values are not converted, and unknown fields are refused."""

    model_config = ConfigDict(extra="forbid", strict=True, use_attribute_docstrings=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _check_number_of_fields(cls, values: Any) -> Any:
        if isinstance(values, dict) and len(values) > _MAX_FIELDS:
            raise ValueError(f"{len(values):,} fields are more than {_MAX_FIELDS}")
        return values


class StreamOptions(Body):
    """Options of a streamed answer."""

    include_usage: bool = False
    """Send the usage of the whole request in a last chunk without choices."""
    include_obfuscation: Literal[False] | None = None


class Sampling(Body):
    """Fields that completions and chat completions share."""

    model: str
    """Name of the model, as /v1/models lists it."""
    temperature: Annotated[float, Field(ge=0, le=100)] | None = 1.0
    """Logits are divided by it; 0 always takes the most likely token."""
    top_p: Annotated[float, Field(gt=0, le=1)] | None = 1.0
    """Sample from the smallest set of most likely tokens whose total probability is at least top_p."""
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] | None = None
    """Sample from the k most likely tokens; 0 or -1: from all. Not in OpenAI's API."""
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    """Sample from the tokens with at least min_p times the probability of the most likely one. Not in OpenAI's API."""
    n: Annotated[int, Field(ge=1)] | None = 1
    """Number of samples for each prompt; sample i has seed + i."""
    stop: Stop | None = None
    """Strings that end the text; they are not part of it."""
    seed: Seed | None = None
    """Seed of the sampling; the same request with the same seed gives the same text."""
    stream: bool | None = False
    """Send the text as server-sent events while it is generated."""
    stream_options: StreamOptions | None = None
    session: Annotated[str, Field(max_length=100)] | None = None
    """Id of a session whose memory this text continues and is added to, or `new`. Not in OpenAI's API."""
    memory_length: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    """Memory slots in tokens; 0: no memory beyond one segment. Not in OpenAI's API."""
    user: str | None = None
    presence_penalty: Literal[0] | None = None
    frequency_penalty: Literal[0] | None = None
    logit_bias: Annotated[dict[Any, Any], Field(max_length=0)] | None = None


class CompletionBody(Sampling):
    """The body of /v1/completions."""

    prompt: (
        str
        | Annotated[list[str], Field(fail_fast=True)]
        | TokenIds
        | Annotated[list[Annotated[TokenIds, Field(min_length=1)]], Field(fail_fast=True)]
        | None
    ) = None
    """Text or token ids to continue, or a list of these; null or "": begin a new text, or go on in the session."""
    max_tokens: Annotated[int, Field(ge=0, lt=2**31)] | None = 16
    """Number of tokens to generate at most; 0 only reads the prompt."""
    best_of: Annotated[int, Field(ge=1)] | None = None
    """Number of samples of which the n with the highest log-probability per token are returned."""
    echo: bool | None = False
    """Return the prompt before the text, with its log-probabilities where `logprobs` is given."""
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    """Number of most likely tokens to return at each position; 0: only the log-probability of each token."""
    add_special_tokens: bool = True
    """Whether the token that begins a text is read before the prompt, if that begins one. Not in OpenAI's API."""
    return_tokens_as_token_ids: bool = False
    """Write tokens as `token_id:5`, which tells all of them apart, rather than as text. Not in OpenAI's API."""
    suffix: Literal[""] | None = None


class TextPart(Body):
    """A part of a message."""

    type: Literal["text"]
    text: str


class Message(Body):
    """A message of a chat."""

    role: Annotated[str, Field(min_length=1, max_length=100)]
    content: str | Annotated[list[TextPart], Field(fail_fast=True)]
    name: str | None = None

    @property
    def text(self) -> str:
        """The text of the message."""
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


class ChatBody(Sampling):
    """The body of /v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1, max_length=10_000, fail_fast=True)]
    max_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    """Number of tokens to generate at most."""
    max_completion_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    """The newer name of max_tokens."""
    logprobs: bool | None = False
    """Return the log-probability of each token."""
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    """Number of most likely tokens to return at each position."""


class TokenizeBody(Body):
    """The body of /tokenize."""

    model: str | None = None
    """Name of the model, the first one if it is left out."""
    prompt: str
    add_special_tokens: bool = True
    """Whether the token that begins a text comes first."""


class DetokenizeBody(Body):
    """The body of /detokenize."""

    model: str | None = None
    """Name of the model, the first one if it is left out."""
    tokens: TokenIds


class AttentionBody(Body):
    """The body of /attention."""

    model: str | None = None
    """Name of the model, the first one if it is left out."""
    prompt: str | TokenIds
    """Text or token ids."""
    position: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    """Index of the token whose attention is returned, from 0; the last one if it is left out."""
    memory_length: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    """Memory slots in tokens, those of the run if it is left out."""
    add_special_tokens: bool = True
    """Whether the token that begins a text is read before the prompt."""


class SessionBody(Body):
    """The body of POST /v1/sessions."""

    model: str
    memory_length: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    """Memory slots in tokens, those of the run if it is left out."""
