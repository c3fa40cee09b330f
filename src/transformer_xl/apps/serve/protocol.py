"""The bodies of requests, as in OpenAI's API, and the errors of that API.

Null is as if a field were left out. Fields that this server does not support are accepted with the value that changes
nothing, and else refused by name, as unknown ones are.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

MAX_STOPS = 16
MAX_STOP_CHARACTERS = 1000
MAX_LOGPROBS = 20

_MAX_FIELDS = 100  # of a body

Seed = Annotated[int, Field(ge=-1, lt=2**63)]
# the lists end at the first wrong value: an error for each of a million values takes gigabytes
TokenIds = Annotated[list[Annotated[int, Field(ge=0, lt=2**31)]], Field(fail_fast=True)]
StopString = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARACTERS)]
Stop = StopString | Annotated[list[StopString], Field(max_length=MAX_STOPS, fail_fast=True)]
EmptyList = Annotated[list[Any], Field(max_length=0)]


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
    """Base class of request bodies: values are not converted, null is left out, and unknown fields are refused."""

    model_config = ConfigDict(extra="forbid", strict=True, use_attribute_docstrings=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _without_null(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        if len(values) > _MAX_FIELDS:
            raise ValueError(f"{len(values):,} fields are more than {_MAX_FIELDS}")
        return {name: value for name, value in values.items() if value is not None}


class StreamOptions(Body):
    """Options of a streamed answer."""

    include_usage: bool = False
    """Send the usage of the whole request in a last chunk without choices."""
    include_obfuscation: Literal[False] = False


class ResponseFormat(Body):
    """The form of an answer: text."""

    type: Literal["text"] = "text"


class Sampling(Body):
    """Fields that completions and chat completions share."""

    model: str
    """Name of the model, as /v1/models lists it."""
    temperature: Annotated[float, Field(ge=0, le=100)] = 1.0
    """Logits are divided by it; 0 always takes the most likely token."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Sample from the smallest set of most likely tokens whose total probability is at least top_p."""
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] | None = None
    """Sample from the k most likely tokens; 0 or -1: from all. Not in OpenAI's API."""
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    """Sample from the tokens with at least min_p times the probability of the most likely one. Not in OpenAI's API."""
    n: Annotated[int, Field(ge=1)] = 1
    """Number of samples for each prompt; sample i has seed + i."""
    stop: Stop | None = None
    """Strings that end the text; they are not part of it."""
    seed: Seed | None = None
    """Seed of the sampling; the same request with the same seed gives the same text. -1: at random."""
    stream: bool = False
    """Send the text as server-sent events while it is generated."""
    stream_options: StreamOptions | None = None
    session: Annotated[str, Field(max_length=100)] | None = None
    """Id of a session whose memory this text continues and is added to, or `new`. Not in OpenAI's API."""
    memory_length: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    """Memory slots in tokens; 0: no memory beyond one segment. Not in OpenAI's API."""
    # what changes no answer
    user: str = ""
    safety_identifier: str = ""
    prompt_cache_key: str = ""
    service_tier: str = ""
    metadata: dict[str, Any] = {}
    parallel_tool_calls: bool = True
    skip_special_tokens: bool = True
    # what this server does not do, with the value that asks for nothing
    presence_penalty: Literal[0] = 0
    frequency_penalty: Literal[0] = 0
    repetition_penalty: Literal[1] = 1
    min_tokens: Literal[0] = 0
    ignore_eos: Literal[False] = False
    store: Literal[False] = False
    logit_bias: Annotated[dict[Any, Any], Field(max_length=0)] = {}
    stop_token_ids: EmptyList = []
    tools: EmptyList = []
    functions: EmptyList = []
    tool_choice: Literal["none", "auto"] = "none"
    function_call: Literal["none", "auto"] = "none"
    reasoning_effort: Literal["none"] = "none"
    modalities: Annotated[list[Literal["text"]], Field(fail_fast=True)] = ["text"]
    response_format: ResponseFormat = ResponseFormat()


class CompletionBody(Sampling):
    """The body of /v1/completions."""

    prompt: (
        str
        | Annotated[list[str], Field(fail_fast=True)]
        | TokenIds
        | Annotated[list[Annotated[TokenIds, Field(min_length=1)]], Field(fail_fast=True)]
    ) = ""
    """Text or token ids to continue, or a list of these; null or "": begin a new text, or go on in the session."""
    max_tokens: Annotated[int, Field(ge=0, lt=2**31)] = 16
    """Number of tokens to generate at most; 0 only reads the prompt."""
    best_of: Annotated[int, Field(ge=1)] | None = None
    """Number of samples of which the n with the highest log-probability per token are returned."""
    echo: bool = False
    """Return the prompt before the text, with its log-probabilities where `logprobs` is given."""
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    """Number of most likely tokens to return at each position; 0: only the log-probability of each token."""
    add_special_tokens: bool = True
    """Whether the token that begins a text is read before the prompt, if that begins one. Not in OpenAI's API."""
    return_tokens_as_token_ids: bool = False
    """Write tokens as `token_id:5`, which tells all of them apart, rather than as text. Not in OpenAI's API."""
    suffix: Literal[""] = ""


class TextPart(Body):
    """A part of a message."""

    type: Literal["text"]
    text: str


class Message(Body):
    """A message of a chat."""

    role: Annotated[str, Field(min_length=1, max_length=100)]
    content: str | Annotated[list[TextPart], Field(fail_fast=True)]
    name: str | None = None
    # what clients send back of other servers' messages, and is no part of the text
    tool_calls: list[Any] = []
    tool_call_id: str | None = None
    function_call: dict[str, Any] = {}
    annotations: list[Any] = []
    audio: dict[str, Any] = {}

    @model_validator(mode="before")
    @classmethod
    def _may_be_empty(cls, values: Any) -> Any:
        if isinstance(values, dict) and values.get("role") == "assistant" and values.get("content") is None:
            return {**values, "content": ""}
        return values

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
    logprobs: bool = False
    """Return the log-probability of each token."""
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] = 0
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
