"""A request for text, from its body to the jobs that the engine runs, and their events in the event loop."""

from __future__ import annotations

import asyncio
import re
import secrets
import time
from collections import defaultdict, deque
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from starlette.requests import Request

from transformer_xl.apps.serve.config import ServerConfig
from transformer_xl.apps.serve.engine import MAX_VALUES, Engine, QueueFullError
from transformer_xl.apps.serve.jobs import AnswerSize, Event, Failed, Finished, TextJob
from transformer_xl.apps.serve.metrics import Metrics
from transformer_xl.apps.serve.protocol import ApiError, AttentionBody, ChatBody, CompletionBody, Message, Sampling
from transformer_xl.apps.serve.rows import MemoryState
from transformer_xl.apps.serve.served_model import ServedModel
from transformer_xl.apps.serve.sessions import Session, SessionStore
from transformer_xl.config import UserError, check_settings
from transformer_xl.evaluation.attention_by_distance import require_attention_terms
from transformer_xl.generation.chat import rest_of_end
from transformer_xl.generation.generation_config import GenerationConfig

_MAX_ATTENTION = 2**21  # probabilities in an answer
_MAX_PROMPTS = 256  # of a request
_LATE = "the request was not done in time"
CLIENT_CLOSED = 499  # the status, of nginx, for a client that did not wait for its answer


@dataclass(eq=False)
class TextRequest:
    """A request for text: its jobs, and the session that it continues."""

    served: ServedModel
    jobs: list[TextJob]
    size: AnswerSize
    """Tokens generated, and tokens of prompts that are scored or returned, over all samples, times 1 + logprobs."""
    num_returned: int
    """Samples of each prompt that are returned."""
    session: Session | None = None
    message_end: str = ""
    """How the template ends each message of a chat."""
    queue: asyncio.Queue[tuple[int, list[Event]] | ApiError] = field(default_factory=asyncio.Queue)
    """Events of the jobs, each with the index of its job; an error ends the request."""
    started: float = field(default_factory=time.monotonic)

    @property
    def prompt_tokens(self) -> int:
        """Number of tokens of all prompts."""
        return sum(len(job.prompt_ids) for job in self.jobs)

    @property
    def completion_tokens(self) -> int:
        """Number of tokens generated so far."""
        return sum(job.num_generated for job in self.jobs)


class RequestRunner:
    """Makes jobs of request bodies, and runs them."""

    def __init__(self, models: Sequence[ServedModel], config: ServerConfig) -> None:
        """Prepare to serve these models; the engine is not started.

        Raises:
            UserError: the memory of a whole batch certainly does not fit on the device, or the folder of sessions
                cannot be made.
        """
        self.config, self.metrics = config, Metrics()
        self.engine = Engine(models, max_rows=config.max_batch, max_waiting=config.max_waiting)
        folder = None if config.sessions is None else Path(config.sessions)
        self.sessions = SessionStore(self.engine.models, config.session_bytes, folder)
        self.threads = defaultdict[str, asyncio.Semaphore](lambda: asyncio.Semaphore(2))
        """Bound by owner of the threads that encode prompts or make answers, of which others must get some too."""
        self._news = deque[tuple[TextRequest, int, list[Event]]]()
        self._is_woken = False  # whether the event loop will see them

    def model(self, name: str | None) -> ServedModel:
        """Return a model by name, or the first one for None.

        Raises:
            ApiError: there is no such model.
        """
        models = self.engine.models
        if name is None:
            return next(iter(models.values()))
        if name not in models:
            known = ", ".join(models)
            message = f"no model {name[:100]!r}; the models are {known}"
            raise ApiError(404, message, param="model", code="model_not_found")
        return models[name]

    def check_prompt(self, num_tokens: int) -> int:
        """Return the number of tokens of all prompts of a request.

        Raises:
            ApiError: it is too large.
        """
        longest = self.config.max_prompt_tokens
        if num_tokens > longest:
            message = f"the prompt has {num_tokens:,} tokens, more than {longest:,}; shorten it, or send it in parts to"
            raise ApiError(400, f"{message} a session", param="prompt")
        return num_tokens

    async def chat(self, body: ChatBody, owner: str, session_header: str | None) -> TextRequest:
        """Return the request of a chat completion: that of the completion of its messages as text.

        Raises:
            ApiError: there is no chat template, or something in the body is wrong.
            UserError: as for `completion`.
        """
        template = self.config.chat_template
        if template is None:
            message = "this server has no chat template; start it with --chat-template plain, or use /v1/completions"
            raise ApiError(400, message, code="no_chat_template")
        if body.top_logprobs and not body.logprobs:
            raise ApiError(400, "top_logprobs needs logprobs: true", param="top_logprobs")
        lengths = {length for length in (body.max_tokens, body.max_completion_tokens) if length is not None}
        if len(lengths) > 1:
            raise ApiError(400, "max_tokens and max_completion_tokens are the same; give one", param="max_tokens")
        end = template.partition("{content}")[2].replace("{role}", "assistant")
        sampling: dict[str, Any] = {name: getattr(body, name) for name in Sampling.model_fields}
        sampling["stop"] = [*_stops(body), *([end] if end else [])]
        completion = CompletionBody.model_construct(
            **sampling,
            prompt=chat_prompt(template, body.messages),
            max_tokens=max(lengths, default=min(256, self.config.max_tokens)),
            logprobs=body.top_logprobs if body.logprobs else None,
        )
        return await self.completion(completion, owner, session_header, message_end=end)

    async def completion(
        self, body: CompletionBody, owner: str, session_header: str | None, *, message_end: str = ""
    ) -> TextRequest:
        """Return the request of a completion.

        Args:
            body: what is asked for.
            owner: whose request it is.
            session_header: a session that the header names.
            message_end: how the template ends each message of a chat.

        Raises:
            ApiError: something in the body is wrong.
            UserError: the prompt cannot be encoded, or the memory length is too large.
        """
        served, prompts = self.model(body.model), _prompts(body.prompt)
        session_id = body.session or session_header or None
        num_returned, max_tokens = body.n, body.max_tokens
        if "max_tokens" not in body.model_fields_set:
            max_tokens = min(max_tokens, self.config.max_tokens)
        num_samples = max(body.best_of or 1, num_returned)
        self._check_counts(body, len(prompts), num_samples, max_tokens)
        if session_id is not None and (len(prompts) > 1 or num_samples > 1):
            raise ApiError(
                400, "a session takes one prompt and n 1: which sample would it go on with?", param="session"
            )
        # those of the tokens are needed to rank samples
        num_logprobs = 0 if num_samples > num_returned and body.logprobs is None else body.logprobs
        score_prompt, unsaid = body.echo and body.logprobs is not None, ""
        memory_length = served.check_memory_length(body.memory_length)
        if score_prompt and not memory_length:
            served.plan.refuse_extended_context("scoring a prompt")
        if message_end and session_id not in (None, "new"):
            unsaid = self.sessions.get(session_id, owner).message_end
            prompts = [f"{unsaid}{prompt}" for prompt in prompts]
        encoded = await self._encoded(served, prompts, owner)
        prompt_tokens = self.check_prompt(sum(map(len, encoded)))
        work = max_tokens * num_samples * len(encoded) + prompt_tokens * (num_samples if body.echo else 0)
        size = AnswerSize(owner, work * (1 + (num_logprobs or 0)))
        if size.num_values > MAX_VALUES:
            message = "samples x (max_tokens + tokens of echoed prompts) x (1 + logprobs)"
            raise ApiError(400, f"{message} is too much, more than {MAX_VALUES:,}; split the request")
        seed = secrets.randbelow(2**63) if body.seed in (None, -1) else body.seed
        end = served.run.tokenizer.document_end
        config = _config(body, max_tokens, seed, () if end is None else (end.id,))
        session = self._session(session_id, owner, served, body.memory_length)
        try:
            if session is not None:
                memory_length = session.memory_length
                if message_end and session.message_end != unsaid:
                    raise ApiError(409, "another request has changed the session", param="session", code="session_busy")
            request = TextRequest(served, [], size, num_returned, session, message_end)
            for index, ids in enumerate(encoded):
                if not ids and not (session and session.state) and not body.add_special_tokens:
                    raise ApiError(400, "the prompt is empty; give some text", param="prompt")
                job = TextJob(
                    served,
                    ids,
                    config.model_copy(update={"seed": (seed + index * num_samples) % 2**63}),
                    max_tokens,
                    self._listener(request, index),
                    num_samples=num_samples,
                    add_bos=body.add_special_tokens,
                    num_logprobs=num_logprobs,
                    score_prompt=score_prompt,
                    memory_length=memory_length,
                    state=session.state if session else None,
                    keep_state=session is not None,
                    owner=owner,
                    streams=body.stream,
                    answer_size=size,
                )
                request.jobs.append(job)
            # the prompts are decoded here, not in the thread of the engine, for which all texts would wait
            async with self.threads[owner]:
                await asyncio.to_thread(lambda: [job.builder for job in request.jobs if job.max_tokens])
            self._submit(request)
        except BaseException:
            self._release(session)
            raise
        return request

    def _check_counts(self, body: CompletionBody, num_prompts: int, num_samples: int, max_tokens: int) -> None:
        """Check what is asked for before anything is computed for it.

        Raises:
            ApiError: it is too much, or contradicts itself.
        """
        longest = self.config.max_tokens
        if body.best_of is not None and body.best_of < body.n:
            raise ApiError(400, f"best_of {body.best_of} is below n {body.n}", param="best_of")
        if body.stream and num_samples > body.n:
            raise ApiError(400, "best_of above n cannot be streamed: the best is known at the end", param="best_of")
        if body.stream_options is not None and not body.stream:
            raise ApiError(400, "stream_options needs stream: true", param="stream_options")
        if num_prompts > _MAX_PROMPTS:
            raise ApiError(400, f"{num_prompts} prompts are more than {_MAX_PROMPTS}", param="prompt")
        if num_samples > self.engine.max_rows:
            raise ApiError(400, f"n or best_of {num_samples} is above {self.engine.max_rows}", param="n")
        if max_tokens > longest:
            raise ApiError(400, f"max_tokens {max_tokens:,} is above {longest:,}", param="max_tokens")

    async def attention(self, body: AttentionBody, owner: str) -> TextRequest:
        """Return the request of the attention of one token.

        Raises:
            ApiError: something in the body is wrong.
            UserError: the model has no attention that can be shown, or a token or memory length is wrong.
        """
        served = self.model(body.model)
        config = require_attention_terms(served.run.model).config
        memory_length = served.check_memory_length(body.memory_length)
        (ids,) = await self._encoded(served, [body.prompt], owner)
        if not self.check_prompt(len(ids)):
            raise ApiError(400, "the prompt is empty; give some text", param="prompt")
        position = len(ids) - 1 if body.position is None else body.position
        if position >= len(ids):
            raise ApiError(400, f"position {position:,}: the prompt has {len(ids):,} tokens", param="position")
        num_seen = min(position + 2, memory_length + served.plan.segment_length)
        size = AnswerSize(owner, config.n_layers * config.n_heads * num_seen)
        if size.num_values > _MAX_ATTENTION:
            message = f"the attention of {config.n_layers} x {config.n_heads} heads to {num_seen:,} tokens is too much"
            raise ApiError(400, f"{message} for one request; lower memory_length", param="memory_length")
        request = TextRequest(served, [], size, 1)
        request.jobs.append(
            TextJob(
                served,
                ids[: position + 1],
                GenerationConfig(),
                0,
                self._listener(request, 0),
                add_bos=body.add_special_tokens,
                memory_length=memory_length,
                shows_attention=True,
                owner=owner,
                answer_size=size,
            )
        )
        self._submit(request)
        return request

    async def _encoded(self, served: ServedModel, prompts: Sequence[str | list[int]], owner: str) -> list[list[int]]:
        encode, check = served.run.tokenizer.encode, served.run.tokenizer.check_ids

        def encoded() -> list[list[int]]:
            return [(encode(prompt) if isinstance(prompt, str) else check(prompt)).tolist() for prompt in prompts]

        async with self.threads[owner]:
            return await asyncio.to_thread(encoded)

    def _listener(self, request: TextRequest, job: int) -> Callable[[list[Event]], object]:
        """Return what the engine's thread tells the events of a job, by its index, to be seen in the event loop."""
        loop = asyncio.get_running_loop()

        def listen(events: list[Event]) -> None:
            self._news.append((request, job, events))
            if not self._is_woken:  # once for what many jobs get in a step: waking it takes long
                self._is_woken = True
                try:
                    loop.call_soon_threadsafe(self._deliver)
                except RuntimeError:  # it is closed
                    self._is_woken = False
                    raise

        return listen

    def _deliver(self) -> None:
        self._is_woken = False  # first, as more may come meanwhile
        while self._news:
            request, job, events = self._news.popleft()
            request.queue.put_nowait((job, events))

    def _submit(self, request: TextRequest) -> None:
        try:
            self.engine.submit(*request.jobs)
        except QueueFullError:
            message, headers = "too many requests of this key wait; try again later", {"retry-after": "5"}
            raise ApiError(429, message, code="queue_full", headers=headers) from None
        except UserError as error:
            raise ApiError(503, str(error)) from None

    def _session(
        self, session_id: str | None, owner: str, served: ServedModel, memory_length: int | None
    ) -> Session | None:
        """Return the session of a request, which no other request may change until it is released."""
        if session_id is None:
            return None
        if session_id == "new":
            return self.sessions.reserve(owner, served.name, served.check_memory_length(memory_length))
        session = self.sessions.acquire(session_id, owner)
        problem = None
        if session.model != served.name:
            problem = f"the session belongs to the model {session.model}, not {served.name}"
        elif memory_length not in (None, session.memory_length):
            problem = f"the session has memory_length {session.memory_length}, which cannot change"
        if problem is not None:
            self.sessions.release(session_id)
            raise ApiError(400, problem, param="session")
        return session

    def _release(self, session: Session | None) -> None:
        if session is not None:
            self.sessions.release(session.id)

    def _commit(self, request: TextRequest, session: Session, state: MemoryState) -> None:
        """Give a session its next state, and what the reply lacks of the end of a message."""
        (job,) = request.jobs
        text = request.served.run.tokenizer.decode(job.kept_ids)
        self.sessions.commit(session, state, rest_of_end(text, request.message_end))

    async def events(self, request: TextRequest, connection: Request) -> AsyncGenerator[tuple[int, list[Event]], None]:
        """Yield the events of a request's jobs until all are finished; the session is committed before the last ones.

        However it ends, by the client going away too, its jobs end and its session is released.

        Raises:
            ApiError: a job failed, the time is up, or the client has gone.
        """
        left, is_first, is_ended, saving = len(request.jobs), True, False, None

        def end(error: ApiError | None = None) -> None:
            nonlocal is_ended
            if is_ended:
                return
            is_ended = True
            if error is not None:
                request.queue.put_nowait(error)
            for job in request.jobs:
                self.engine.cancel(job)
            if saving is None:
                self._release(request.session)
            else:
                saving.add_done_callback(lambda _: self._release(request.session))

        async def watch() -> None:
            while (await connection.receive())["type"] != "http.disconnect":
                pass
            request.queue.put_nowait(ApiError(CLIENT_CLOSED, "the client has closed the connection"))

        watcher = asyncio.create_task(watch())
        late, seconds = ApiError(504, _LATE, code="timeout"), request.started + self.config.timeout - time.monotonic()
        # on time also while the client does not read, for which a generator waits
        timer = asyncio.get_running_loop().call_later(seconds, end, late)
        try:
            while left:
                news = await request.queue.get()
                if isinstance(news, ApiError) or is_ended:
                    raise news if isinstance(news, ApiError) else late
                index, events = news
                if is_first:
                    self.metrics.first_token_seconds.add(time.monotonic() - request.started)
                    is_first = False
                end_event = events[-1]
                if isinstance(end_event, Failed):
                    if events[:-1]:  # what came before it was not told yet
                        yield index, events[:-1]
                    raise ApiError(end_event.status, end_event.message)
                if isinstance(end_event, Finished):
                    left -= 1
                    if request.session is not None and end_event.state is not None:
                        # it goes on if the client goes away meanwhile, and until then no other request may write
                        saving = asyncio.ensure_future(
                            asyncio.to_thread(self._commit, request, request.session, end_event.state)
                        )
                        await asyncio.shield(saving)
                yield index, events
        finally:
            watcher.cancel()
            timer.cancel()
            end()
            self.metrics.request_seconds.add(time.monotonic() - request.started)


def chat_prompt(template: str, messages: Sequence[Message]) -> str:
    """Return the messages as text, and then the beginning of the reply."""

    def filled(part: str, role: str, content: str) -> str:
        values = {"role": role, "content": content}
        return re.sub(r"\{(role|content)\}", lambda match: values[match[1]], part)

    texts = [filled(template, message.role, message.text) for message in messages]
    return "".join(texts) + filled(template.partition("{content}")[0], "assistant", "")


def _prompts(prompt: object) -> list[str | list[int]]:
    """Return the prompts of a body, which may have one or several, as text or token ids."""
    if isinstance(prompt, str):
        return [prompt]
    assert isinstance(prompt, list)
    if not prompt:
        raise ApiError(400, "prompt is an empty list; give some text", param="prompt")
    return [prompt] if isinstance(prompt[0], int) else prompt


def _config(body: CompletionBody, max_tokens: int, seed: int, eos_token_ids: tuple[int, ...]) -> GenerationConfig:
    values = {
        "max_new_tokens": max(1, max_tokens),
        "temperature": float(body.temperature),
        "top_p": None if body.top_p == 1 else body.top_p,
        "top_k": body.top_k if body.top_k is not None and body.top_k > 0 else None,
        "min_p": body.min_p or None,
        "seed": seed,
        "stop": _stops(body),
        "eos_token_ids": eos_token_ids,
    }
    return check_settings(GenerationConfig, values)


def _stops(body: Sampling) -> tuple[str, ...]:
    return (body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ())
