"""The HTTP API: OpenAI's completions and chat completions, tokens, attention, sessions, health and metrics.

What a body may have is in `protocol.py`, what is checked before in `guard.py`, how a request runs in `requests.py`.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from dataclasses import dataclass, field, replace
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Header, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse, StreamingResponse
from pydantic_core import to_json
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from transformer_xl import __version__
from transformer_xl.apps.serve.answers import (
    LargeAnswer,
    NamesInPlace,
    SampleNames,
    TokenNames,
    chat_logprobs,
    completion_logprobs,
    error_answer,
    finish_reason,
    text_offsets,
)
from transformer_xl.apps.serve.jobs import Delta, Event
from transformer_xl.apps.serve.metrics import resident_bytes
from transformer_xl.apps.serve.page_files import add_page
from transformer_xl.apps.serve.protocol import (
    MAX_STOP_CHARACTERS,
    MAX_STOPS,
    ApiError,
    AttentionBody,
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    SessionBody,
    TokenizeBody,
)
from transformer_xl.apps.serve.requests import CLIENT_CLOSED, RequestRunner, TextRequest
from transformer_xl.config import UserError

_ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"description": HTTPStatus(status).phrase, "content": {"application/json": {}}}
    for status in (400, 401, 403, 404, 409, 413, 415, 422, 429, 500, 503, 504, 507)
}


def build_app(runner: RequestRunner) -> FastAPI:
    """Return the application.

    Args:
        runner: runs the requests.
    """
    app = FastAPI(
        title="transformer-xl",
        version=__version__,
        docs_url=None,  # those pages load scripts from other hosts
        redoc_url=None,
        redirect_slashes=False,
        responses=_ERRORS,
        exception_handlers=dict.fromkeys(
            (ApiError, UserError, RequestValidationError, ClientDisconnect, HTTPException, Exception), _answer_error
        ),
    )
    names = {name: TokenNames(served.run.tokenizer) for name, served in runner.engine.models.items()}
    created = int(time.time())

    @app.post("/v1/completions")
    async def completions(
        body: CompletionBody, request: Request, x_session: str | None = Header(default=None)
    ) -> Response:
        """Continue one or several texts."""
        text = await runner.completion(body, request.state.owner, x_session)
        return await _respond(
            runner, request, _CompletionAnswer(text, body, SampleNames(names[text.served.name], text.jobs))
        )

    @app.post("/v1/chat/completions")
    async def chat_completions(
        body: ChatBody, request: Request, x_session: str | None = Header(default=None)
    ) -> Response:
        """Reply to messages, where the server has a chat template."""
        text = await runner.chat(body, request.state.owner, x_session)
        return await _respond(runner, request, _ChatAnswer(text, body, SampleNames(names[text.served.name], text.jobs)))

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        """List the models."""
        data = [_model_entry(runner, name, created) for name in runner.engine.models]
        return {"object": "list", "data": data}

    @app.get("/v1/models/{name}")
    async def model(name: str) -> dict[str, Any]:
        """Describe a model."""
        return _model_entry(runner, runner.model(name).name, created)

    @app.post("/tokenize")
    async def tokenize(body: TokenizeBody, request: Request) -> Response:
        """Return the token ids of a text."""
        async with runner.threads[request.state.owner]:
            return await run_in_threadpool(encoded, body)

    def encoded(body: TokenizeBody) -> Response:
        served = runner.model(body.model)
        tokenizer = served.run.tokenizer
        ids = tokenizer.encode(body.prompt).tolist()
        runner.check_prompt(len(ids))
        strings = names[served.name].parts_of(body.prompt, ids)
        if body.add_special_tokens:
            ids = [tokenizer.bos_token_id, *ids]
            strings = [names[served.name].text_of(ids[0]), *strings]
        return LargeAnswer({"count": len(ids), "tokens": ids, "token_strs": strings})

    @app.post("/detokenize")
    async def detokenize(body: DetokenizeBody, request: Request) -> Response:
        """Return the text of token ids, whole and of each token."""
        async with runner.threads[request.state.owner]:
            return await run_in_threadpool(decoded, body)

    def decoded(body: DetokenizeBody) -> Response:
        served = runner.model(body.model)
        tokenizer = served.run.tokenizer
        runner.check_prompt(len(body.tokens))
        ids = tokenizer.check_ids(body.tokens).tolist()
        strings = names[served.name].in_place(ids)
        return LargeAnswer({"prompt": tokenizer.decode(ids), "token_strs": strings})

    @app.get("/tokenizer_info")
    async def tokenizer_info(model: str | None = None) -> dict[str, Any]:
        """Describe the tokenizer of a model, the first one if none is named."""
        served = runner.model(model)
        tokenizer, end = served.run.tokenizer, served.run.tokenizer.document_end
        eos = tokenizer.eos_token_id if end is None else end.id
        return {
            "model": served.name,
            "tokenizer_class": type(tokenizer).__name__,
            "kind": tokenizer.kind,
            "vocab_size": tokenizer.vocab_size,
            "bos_token": end.name if end else tokenizer.decode([tokenizer.bos_token_id]),
            "bos_token_id": tokenizer.bos_token_id,
            "eos_token": end.name if end else None if eos is None else tokenizer.decode([eos]),
            "eos_token_id": eos,
            "pad_token": None,
        }

    @app.post("/attention")
    async def attention(body: AttentionBody, request: Request) -> Response:
        """Return what one token attends to: the probability at each distance, of each layer and head."""
        text = await runner.attention(body, request.state.owner)
        request.state.at_end.callback(runner.engine.release, text.size)
        async for _ in runner.events(text, request):
            pass
        (job,) = text.jobs
        assert job.attention_LNP is not None
        rounded_LNP = job.attention_LNP.double().round(decimals=6)
        answer = {
            "object": "attention",
            "model": text.served.name,
            "position": len(job.prompt_ids) - 1,
            "memory_length": job.memory_length,
            "attention": await run_in_threadpool(rounded_LNP.tolist),
        }
        return await run_in_threadpool(LargeAnswer, answer)

    _add_sessions(app, runner)
    add_page(app)

    @app.get("/health")
    async def health() -> JSONResponse:
        """Say whether the model thread runs."""
        error = runner.engine.error
        return JSONResponse({"status": "ok" if error is None else "failed"}, 200 if error is None else 503)

    @app.get("/metrics", response_class=PlainTextResponse)
    async def metrics() -> PlainTextResponse:
        """Return measured values in the text format of Prometheus."""
        engine, sessions = runner.engine, runner.sessions
        counters = {f"{name}_total": value for name, value in vars(engine.counters).items()}
        gauges = {
            "requests_waiting": engine.num_waiting,
            "sequences_running": engine.num_running,
            "sessions": len(sessions),
            "session_bytes": sessions.num_bytes,
            "resident_bytes": resident_bytes(),
        }
        text = runner.metrics.text(counters, gauges)
        return PlainTextResponse(text, media_type="text/plain; version=0.0.4; charset=utf-8")

    return app


def _model_entry(runner: RequestRunner, name: str, created: int) -> dict[str, Any]:
    served = runner.engine.models[name]
    length = served.check_memory_length(None)
    return {
        "id": name,
        "object": "model",
        "created": created,
        "owned_by": "transformer-xl",
        "architecture": served.run.config.model.architecture,
        "vocab_size": served.run.tokenizer.vocab_size,
        "is_lossless": served.run.tokenizer.is_lossless,
        "segment_length": served.plan.segment_length,
        "memory_length": length,
        "max_memory_length": served.max_memory_length,
        "memory_bytes": served.row_bytes(length),
        "attention": served.attention_shape,
    }


async def _answer_error(_: Request, error: Exception) -> JSONResponse:
    """Answer an error in OpenAI's form, without a traceback."""
    if isinstance(error, UserError):
        error = ApiError(400, str(error))
    elif isinstance(error, RequestValidationError):
        error = _explained(error.errors()[0])
    elif isinstance(error, ClientDisconnect):
        error = ApiError(CLIENT_CLOSED, "the client has closed the connection")
    elif isinstance(error, HTTPException):
        message = {404: "no such path", 405: "this path has no such method"}.get(error.status_code, error.detail)
        error = ApiError(error.status_code, message, headers=dict(error.headers or {}))
    elif not isinstance(error, ApiError):
        error = ApiError(500, "the server failed on this request; its log says why")
    return error_answer(error)


_EXPECTED = {
    "prompt": "expected text, a list of texts, a list of token ids, or a list of such lists",
    "stop": f"expected a text of 1 to {MAX_STOP_CHARACTERS} characters, or a list of up to {MAX_STOPS} of them",
    "content": 'expected text, or a list of parts {"type": "text", "text": ...}',
    **dict.fromkeys(("logit_bias", "tools", "functions", "stop_token_ids"), "not supported; leave it out"),
}


def _explained(error: Any) -> ApiError:
    """Return what is wrong in a body, by the name of the field."""
    if error["type"] == "json_invalid":
        return ApiError(400, "the body is not JSON")
    name, expected = "", None
    for part in error["loc"][1:]:
        name += f"[{part}]" if isinstance(part, int) else f".{part}" if name else part
        # of a union there is an error for each of its types, which says less than this
        if expected := _EXPECTED.get(part):
            break
    shown = name[:1000] or "the body"
    if error["type"] == "missing":
        message = f"{shown} is missing"
    elif error["type"] == "extra_forbidden" and expected is None:
        message = f"{shown} is not a field of this request, or is not supported"
    else:
        message = f"{shown}: {expected or error['msg']}"
    return ApiError(400, message[:1100], param=name[:1000] or None)


def _add_sessions(app: FastAPI, runner: RequestRunner) -> None:
    """Add the paths of sessions."""
    sessions = runner.sessions

    @app.get("/v1/sessions")
    def listed(request: Request) -> dict[str, Any]:
        """List the sessions of this API key, the most recently used first."""
        data = [session.as_dict() for session in sessions.listed(request.state.owner)]
        return {"object": "list", "data": data, "bytes": sum(entry["bytes"] for entry in data)}

    @app.post("/v1/sessions")
    def create(body: SessionBody, request: Request) -> dict[str, Any]:
        """Make an empty session."""
        served = runner.model(body.model)
        length = served.check_memory_length(body.memory_length)
        return sessions.create(request.state.owner, served.name, length).as_dict()

    @app.post("/v1/sessions/import")
    async def import_session(request: Request) -> dict[str, Any]:
        """Make a session from an exported file."""
        with sessions.importing() as received:
            async for chunk in request.stream():
                await run_in_threadpool(received.write, chunk)
            session = await run_in_threadpool(sessions.imported, received, request.state.owner)
        return session.as_dict()

    @app.get("/v1/sessions/{session_id}")
    def get(session_id: str, request: Request) -> dict[str, Any]:
        """Describe a session."""
        return sessions.get(session_id, request.state.owner).as_dict()

    @app.delete("/v1/sessions/{session_id}")
    def delete(session_id: str, request: Request) -> dict[str, Any]:
        """Delete a session."""
        sessions.delete(session_id, request.state.owner)
        return {"id": session_id, "object": "session", "deleted": True}

    @app.post("/v1/sessions/{session_id}/branch")
    def branch(session_id: str, request: Request) -> dict[str, Any]:
        """Make a session that begins where this one is now."""
        return sessions.branch(sessions.get(session_id, request.state.owner)).as_dict()

    @app.post("/v1/sessions/{session_id}/snapshot")
    def snapshot(session_id: str, request: Request) -> dict[str, Any]:
        """Keep this session as it is now, under an id that never changes; branch it to go on from there."""
        return sessions.branch(sessions.get(session_id, request.state.owner), "snapshot").as_dict()

    @app.get("/v1/sessions/{session_id}/export")
    def export(session_id: str, request: Request) -> Response:
        """Return a session as a safetensors file."""
        content = sessions.exported(sessions.get(session_id, request.state.owner))
        headers = {"content-disposition": f'attachment; filename="{session_id}.safetensors"'}
        return Response(content, media_type="application/octet-stream", headers=headers)


@dataclass(eq=False)
class _CompletionAnswer:
    """Builds the choices of the answer to /v1/completions, whole or in chunks."""

    text: TextRequest
    body: CompletionBody
    names: SampleNames
    _echoes: dict[int, dict[str, Any]] = field(default_factory=dict)  # of each job, with `echo`

    def base(self, *, chunk: bool) -> dict[str, Any]:
        """Return what every answer and chunk has."""
        return _base(self.text, "cmpl", "text_completion")

    def begin(self, job: int) -> list[dict[str, Any]]:
        """Return the choices with which the samples of a job begin: with `echo`, the prompt."""
        if self.body.logprobs is not None and not self.body.return_tokens_as_token_ids:
            self.names.of(job, 0)  # which may take long, so not in the event loop
        if not self.body.echo:
            return []
        echo, num_samples = self._echo(job), self.text.num_returned
        return [{**echo, "index": echo["index"] + sample} for sample in range(num_samples)]

    def choice(self, job: int, delta: Delta) -> dict[str, Any]:
        """Return the choice of a chunk."""
        begin = len(self._echo(job)["text"]) if self.body.echo else 0
        return self._choice(job, replace(delta, offsets=tuple(begin + offset for offset in delta.offsets)))

    def whole(self, job: int, delta: Delta) -> dict[str, Any]:
        """Return the choice of a whole sample."""
        choice = self.choice(job, delta)
        if self.body.echo:
            echo = self._echo(job)
            choice["text"] = echo["text"] + choice["text"]
            if self.body.logprobs is not None:
                choice["logprobs"] = {name: echo["logprobs"][name] + rest for name, rest in choice["logprobs"].items()}
        return choice

    def _echo(self, job: int) -> dict[str, Any]:
        """Return the choice that the first sample of a job begins with."""
        if job not in self._echoes:
            tokenizer, ids = self.text.served.run.tokenizer, self.text.jobs[job].prompt_ids
            offsets = [] if self.body.logprobs is None else text_offsets(tokenizer, ids)
            delta = Delta(0, tokenizer.decode(ids), self.text.jobs[job].prompt_tokens, offsets, None)
            self._echoes[job] = self._choice(job, delta, NamesInPlace(self.names.names))
        return self._echoes[job]

    def _choice(self, job: int, delta: Delta, names: NamesInPlace | None = None) -> dict[str, Any]:
        index, logprobs = job * self.text.num_returned + delta.sample, None
        if self.body.logprobs is not None:
            is_end = names is not None or delta.finish_reason in ("length", "eos")
            names = None if self.body.return_tokens_as_token_ids else names or self.names.of(job, delta.sample)
            logprobs = completion_logprobs(names, delta.tokens, delta.offsets, is_end=is_end)
        reason = finish_reason(delta.finish_reason)
        return {"index": index, "text": delta.text, "logprobs": logprobs, "finish_reason": reason}


@dataclass(eq=False)
class _ChatAnswer:
    """Builds the choices of the answer to /v1/chat/completions, whole or in chunks."""

    text: TextRequest
    body: ChatBody
    names: SampleNames

    def base(self, *, chunk: bool) -> dict[str, Any]:
        """Return what every answer and chunk has."""
        kind = "chat.completion.chunk" if chunk else "chat.completion"
        return _base(self.text, "chatcmpl", kind)

    def begin(self, job: int) -> list[dict[str, Any]]:
        """Return the choices that say whose message follows."""
        if self.body.logprobs:
            self.names.of(job, 0)
        message = {"delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
        return [{"index": sample, **message} for sample in range(self.text.num_returned)]

    def choice(self, job: int, delta: Delta) -> dict[str, Any]:
        """Return the choice of a chunk."""
        return self._choice(job, delta, {"delta": {"content": delta.text} if delta.text else {}})

    def whole(self, job: int, delta: Delta) -> dict[str, Any]:
        """Return the choice of a whole sample."""
        return self._choice(job, delta, {"message": {"role": "assistant", "content": delta.text, "refusal": None}})

    def _choice(self, job: int, delta: Delta, message: dict[str, Any]) -> dict[str, Any]:
        logprobs = None
        if self.body.logprobs:
            is_end = delta.finish_reason in ("length", "eos")
            logprobs = chat_logprobs(self.names.of(job, delta.sample), delta.tokens, is_end=is_end)
        reason = finish_reason(delta.finish_reason)
        return {"index": delta.sample, **message, "logprobs": logprobs, "finish_reason": reason}


_Answer = _CompletionAnswer | _ChatAnswer
_Events = AsyncGenerator[tuple[int, list[Event]], None]


def _base(text: TextRequest, prefix: str, kind: str) -> dict[str, Any]:
    """Return what every answer and chunk of a kind has; its id begins with `prefix`."""
    session = {} if text.session is None else {"session": text.session.id}
    answer_id, created = f"{prefix}-{secrets.token_hex(12)}", int(time.time())
    return {"id": answer_id, "object": kind, "created": created, "model": text.served.name, **session}


async def _respond(runner: RequestRunner, request: Request, answer: _Answer) -> Response:
    """Run a request and answer it, whole or as a stream."""
    text = answer.text
    request.state.at_end.callback(runner.engine.release, text.size)
    headers = {"x-session": text.session.id} if text.session else {}
    events = runner.events(text, request)
    if not answer.body.stream:
        deltas = {
            (index, event.sample): event async for index, news in events for event in news if isinstance(event, Delta)
        }

        def whole() -> Response:
            content = {**answer.base(chunk=False), "choices": _choices(deltas, answer), "usage": _usage(text)}
            return LargeAnswer(content, headers=headers)

        # log-probabilities of a long text take seconds, for which other requests must not wait
        async with runner.threads[request.state.owner]:
            return await run_in_threadpool(whole)
    first = await anext(events)  # what fails before the first token is still answered with a status
    headers |= {"cache-control": "no-cache", "x-accel-buffering": "no"}
    return StreamingResponse(_stream(first, events, answer), media_type="text/event-stream", headers=headers)


def _choices(deltas: Mapping[tuple[int, int], Delta], answer: _Answer) -> list[dict[str, Any]]:
    """Return the choices of a whole answer, of the samples by job and sample."""
    choices: list[dict[str, Any]] = []
    for index, job in enumerate(answer.text.jobs):
        samples = list(range(job.num_samples))
        if job.num_samples > answer.text.num_returned:  # best_of
            samples = sorted(samples, key=job.mean_logprob, reverse=True)[: answer.text.num_returned]
        for rank, sample in enumerate(samples):
            choices.append(answer.whole(index, replace(deltas[index, sample], sample=rank)))
    return choices


async def _stream(first: tuple[int, list[Event]], events: _Events, answer: _Answer) -> AsyncIterator[str]:
    """Yield the answer as server-sent events."""
    base, options, begun = answer.base(chunk=True), answer.body.stream_options, set[int]()
    include_usage = options is not None and options.include_usage
    if include_usage:
        base["usage"] = None

    def beginning(index: int) -> list[str]:
        return [_sse({**base, "choices": [choice]}) for choice in answer.begin(index)]

    made: list[str] = []
    try:
        news: tuple[int, list[Event]] | None = first
        while news is not None:
            index, parts = news
            if index not in begun:
                begun.add(index)
                made += await run_in_threadpool(beginning, index)
            for event in parts:
                if isinstance(event, Delta):
                    made.append(_sse({**base, "choices": [answer.choice(index, event)]}))
            if made and answer.text.queue.empty():  # what has arrived meanwhile is sent together
                yield "".join(made)
                made = []
            news = await anext(events, None)
    except ApiError as error:
        yield "".join([*made, _sse(error.body())])
        return
    finally:
        await events.aclose()
    if include_usage:
        made.append(_sse({**base, "choices": [], "usage": _usage(answer.text)}))
    yield "".join([*made, "data: [DONE]\n\n"])


def _usage(text: TextRequest) -> dict[str, int]:
    """Return the numbers of tokens of a request."""
    prompt, completion = text.prompt_tokens, text.completion_tokens
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


def _sse(values: dict[str, Any]) -> str:
    return f"data: {to_json(values).decode()}\n\n"
