"""Resumption of interrupted streams with SSE event ids: the client sends the last id back in ``Last-Event-ID``.

Example: ``chatcmpl-6f...e2.1764000000.91c3a0d2b47f65e8.5d10f3a7.0.2f-5ab1c3d4-c-0-1.SIGNATURE``: 47 characters and 12
log-probabilities of the only choice, and its role.
"""

# Outputs are a function of prompt, parameters and seed. So an event id holds all that any API process needs, and the server
# stores nothing: the response id, from which the seed and the ids of tool calls follow, and the amount sent of each choice. The
# response is generated again from its beginning, and the part that was sent is skipped. The amounts are in units that do not
# depend on the division into steps, and have a checksum: if the text differs, the stream ends with an error.

from __future__ import annotations

import dataclasses
import hashlib
import hmac
import re
import secrets
import time
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from outrider.cluster.http.answers.openai_shapes import Answer, Choice, Delta
from outrider.cluster.http.answers.pieces import json_pieces, to_json
from outrider.cluster.http.errors import ApiError
from outrider.cluster.http.types.openai import RequestFields
from outrider.cluster.serving.generation import GenerationJob
from outrider.engine.loading.model_info import ModelInfo, samples_apart

HEADER = "Last-Event-ID"
MAX_EVENT_ID = 8192  # characters; enough for the maximum number of choices
_ROLE, _END, _PROMPT_IDS, _PROMPT_LOGPROBS = 1, 2, 4, 8  # flags of fields that are sent once per choice
_ID = re.compile(
    r"(?P<signed>(?P<answer>[a-z]+-[0-9a-f]{32})\.(?P<created>[0-9]{1,12})\.(?P<digest>[0-9a-f]{16})\.(?P<model>[0-9a-f]{8})\.(?P<usage>[01])"
    r"(?P<sent>(?:\.[0-9a-f]{1,8}(?:-[0-9a-f]{1,8}){4})+))(?:\.(?P<signature>[0-9a-f]{32}))?"
)
_UNSIGNED = (
    "this server does not sign events: set OUTRIDER_CACHE_SECRET to the same value for all of its processes, or leave it out"
)


@dataclass(frozen=True, slots=True)
class StreamHeaders:
    """Request headers that concern the events of a stream."""

    accept: str | None = None
    last_event_id: str | None = None

    @property
    def wants_ids(self) -> bool:
        """Return whether the client parses SSE properly, by its headers."""
        # Many clients expect only ``data: `` lines and fail on an id.
        kinds = (kind.partition(";")[0].strip().lower() for kind in (self.accept or "").split(","))
        return self.last_event_id is not None or "text/event-stream" in kinds


@dataclass(slots=True)
class SentOfChoice:
    """Amount of a choice that was sent to the client."""

    content: int = 0  # characters of reasoning, text and arguments; a call adds its name and one more character
    check: int = 0  # CRC-32 of the content
    logprobs: int = 0  # number of entries
    token_ids: int = 0
    once: int = 0  # flags _ROLE, _END, _PROMPT_IDS and _PROMPT_LOGPROBS


@dataclass(frozen=True, slots=True)
class ResumePoint:
    """Common fields of a response's objects, and the state from which its stream is resumed."""

    answer_id: str
    created: int  # Unix time in seconds
    digest: str = ""  # digest of the request; empty if events have no ids
    model: str = ""  # digest of the model that began the resumed stream
    sent: tuple[SentOfChoice, ...] = ()  # amounts that the resumed stream sent, by choice; empty for a new stream
    has_usage: bool = False  # whether the resumed stream sent the usage
    key: bytes = dataclasses.field(default=b"", repr=False)  # signs event ids

    @classmethod
    def of(cls, prefix: str, body: RequestFields, tenant: str | None, headers: StreamHeaders, key: bytes) -> ResumePoint:
        """Return the beginning of a new or resumed response. ``key`` (at most 64 bytes; empty: no ids) signs event ids.

        Raises ``ApiError``: 400 if ``Last-Event-ID`` is not an event id of this request's stream.
        """
        if headers.last_event_id is not None and not key:
            raise _wrong(_UNSIGNED)
        if headers.last_event_id is not None and not body.stream:
            raise _wrong("it resumes a stream, but the body has no stream: true: send the body of that stream")
        begun = cls(f"{prefix}{secrets.token_hex(16)}", int(time.time()))
        if not (body.stream and headers.wants_ids and key):
            return begun
        hasher = hashlib.blake2b(to_json(tenant), digest_size=8)
        for piece in json_pieces(body):
            hasher.update(piece)
        begun = dataclasses.replace(begun, digest=hasher.hexdigest(), key=key)
        return begun if headers.last_event_id is None else begun._gone_on_with(prefix, headers.last_event_id)

    def _gone_on_with(self, prefix: str, event_id: str) -> ResumePoint:
        """Return the beginning encoded in an event id, which must be of the same request as this new one."""
        found = _ID.fullmatch(event_id)
        if found is None or not found["answer"].startswith(prefix):
            raise _wrong("it is not an event id of this route: send the last received id unchanged, or leave it out")
        # Only ids that an API process signed are accepted; the comparison's time reveals no part of a signature.
        if not hmac.compare_digest(found["signature"] or "", signature_of(found["signed"], self.key)):
            message = "its signature does not match this server's key (OUTRIDER_CACHE_SECRET must be the same for all "
            raise _wrong(
                f"{message}processes of the API, and unchanged since the stream began): send the request again without it"
            )
        if found["digest"] != self.digest:
            raise _wrong("it belongs to another request: send the same body with the same key as before, or leave it out")
        sent = tuple(SentOfChoice(*(int(value, 16) for value in each.split("-"))) for each in found["sent"][1:].split("."))
        return ResumePoint(
            found["answer"], int(found["created"]), self.digest, found["model"], sent, found["usage"] == "1", self.key
        )

    @property
    def seed(self) -> int:
        """Return the seed for requests without one: 63 bits of a hash of the random response id."""
        return int.from_bytes(hashlib.blake2b(self.answer_id.encode(), digest_size=8).digest()) >> 1

    def events(self, jobs: Sequence[GenerationJob], info: ModelInfo, paced: bool) -> EventIds | None:
        """Return the generator of event ids, one job per choice; None without ids. Raises ``ApiError`` if not resumable."""
        model = hashlib.blake2b(f"{info.model_revision} {info.tokenizer_revision}".encode(), digest_size=4).hexdigest()
        # Another model writes another text, to which the amounts do not apply.
        if self.sent and self.model != model:
            message = f"{HEADER}: the model was replaced after this stream began: send the request again without it"
            raise ApiError(400, message, param=HEADER, code="resumed_otherwise")
        why_not = _why_not(jobs[0], info)
        if self.sent and (why_not or len(self.sent) != len(jobs)):
            raise _wrong(why_not or f"it has {len(self.sent)} choices, but the request has {len(jobs)}")
        return EventIds(self, model, len(jobs), paced) if self.digest and not why_not else None


def _why_not(job: GenerationJob, info: ModelInfo) -> str | None:
    """Return why a stream is not reproducible and therefore cannot be resumed; None if it is."""
    name = job.strategy or info.strategy
    if job.report:
        return "a stream with speculation.report cannot be resumed, because its steps may differ: send the request again"
    if not info.is_lossless(job.strategy, job.max_draft_tokens):
        return f"{name} is lossy, so the text may differ: send the request again"
    if samples_apart(name, info.strategies_apart) and job.max_draft_tokens != 0 and not job.params.greedy:
        return f"{name} samples on its own, so the text may differ: send the request again"
    return None


def no_resuming(last_event_id: str | None) -> None:
    """Raise ``ApiError`` (400) if ``Last-Event-ID`` is sent to a route without event ids."""
    if last_event_id is not None:
        raise _wrong("streams of this route cannot be resumed: leave it out, or stream /v1/chat/completions")


def signature_of(name: str, key: bytes) -> str:
    """Return 32 hexadecimal digits that only a holder of the key can compute (BLAKE2b's keyed mode, RFC 7693)."""
    return hashlib.blake2b(name.encode(), key=key, digest_size=16).hexdigest()


def _wrong(message: str) -> ApiError:
    return ApiError(400, f"{HEADER}: {message}", param=HEADER, code="invalid_value")


class EventIds:
    """Generator of a stream's event ids, which also removes content that was sent before (``paced``: sends empty chunks)."""

    def __init__(self, beginning: ResumePoint, model: str, choices: int, paced: bool) -> None:
        self._stream = f"{beginning.answer_id}.{beginning.created}.{beginning.digest}.{model}"
        self._has_usage, self._key = beginning.has_usage, beginning.key
        self._choices = [_ChoiceFilter(sent, paced) for sent in beginning.sent or [SentOfChoice()] * choices]

    def rest(self, chunk: Answer) -> Answer | None:
        """Remove content that was sent before from a chunk, in place; None if nothing is left. Raises ApiError if it differs."""
        if not chunk.choices:
            had_usage, self._has_usage = self._has_usage, True
            return None if had_usage else chunk
        (choice,) = chunk.choices
        return chunk if self._choices[choice.index].take(chunk, choice) else None

    def line(self) -> str:
        """Return the ``id:`` line of the next event, which encodes the amounts sent up to and including it."""
        sent = (choice.sent() for choice in self._choices)
        choices = (f".{one.content:x}-{one.check:x}-{one.logprobs:x}-{one.token_ids:x}-{one.once:x}" for one in sent)
        name = f"{self._stream}.{self._has_usage:d}{''.join(choices)}"
        return f"id: {name}.{signature_of(name, self._key)}\n"


class _ChoiceFilter:
    """Part of one choice that remains to be sent."""

    def __init__(self, before: SentOfChoice, paced: bool) -> None:
        self._before, self._seen, self._paced = before, SentOfChoice(), paced  # sent by the earlier stream; generated so far

    def sent(self) -> SentOfChoice:
        """Return the amounts that the client has."""
        before, seen = self._before, self._seen
        text = max(before, seen, key=lambda one: one.content)
        logprobs, token_ids = max(before.logprobs, seen.logprobs), max(before.token_ids, seen.token_ids)
        return SentOfChoice(text.content, text.check, logprobs, token_ids, before.once | seen.once)

    def take(self, chunk: Answer, choice: Choice) -> bool:
        """Remove content that was sent before from the next chunk; return whether to send the chunk."""
        once, known = _once(chunk, choice), self._before.once
        is_text = not (once & (_ROLE | _END) or choice.delta.tool_calls)
        content, count, ids = _content(choice), _count(choice.logprobs), choice.token_ids or []
        self._seen.once |= once
        if skipped := self._take_content(content):
            _keep_content(choice, content[skipped:])
        if scored := self._take("logprobs", count):
            cut = {name: value[scored:] if isinstance(value, list) else value for name, value in (choice.logprobs or {}).items()}
            choice.logprobs = cut if scored < count else None
        if named := self._take("token_ids", len(ids)):
            choice.token_ids = ids[named:]
        _keep_once(chunk, choice, once & known)
        gone = skipped + scored + named + (once & known).bit_count()
        whole = len(content) + count + len(ids) + once.bit_count()
        return not gone or gone < whole or (self._paced and is_text)

    def _take(self, unit: str, length: int) -> int:
        """Count the next units, and return how many of them were sent before."""
        seen = getattr(self._seen, unit)
        setattr(self._seen, unit, seen + length)
        return min(length, max(0, getattr(self._before, unit) - seen))

    def _take_content(self, content: str) -> int:
        """Do the same as ``_take`` for content. Raises ``ApiError`` if it differs from the content that was sent."""
        before, seen = self._before, self._seen
        skipped = self._take("content", len(content))
        seen.check = zlib.crc32(content[:skipped].encode(), seen.check)
        is_there = seen.content - len(content) + skipped == before.content
        differs = skipped > 0 and is_there and seen.check != before.check
        seen.check = zlib.crc32(content[skipped:].encode(), seen.check)
        is_short = bool(seen.once & _END) and seen.content < before.content
        is_long = bool(before.once & _END) and seen.content > before.content
        if differs or is_short or is_long:
            message = "the answer differs from the one already sent when computed again"
            raise ApiError(500, f"{message}: send the request again without {HEADER}", param=HEADER, code="resumed_otherwise")
        return skipped


def _once(chunk: Answer, choice: Choice) -> int:
    """Return the flags of a chunk's fields that are sent once per choice."""
    flags = (
        (_ROLE, "role" in choice.delta.model_fields_set),
        (_END, choice.finish_reason is not None),
        (_PROMPT_IDS, chunk.prompt_token_ids is not None or choice.prompt_token_ids is not None),
        (_PROMPT_LOGPROBS, chunk.prompt_logprobs is not None or choice.prompt_logprobs is not None),
    )
    return sum(bit for bit, is_there in flags if is_there)


def _keep_once(chunk: Answer, choice: Choice, sent_flags: int) -> None:
    """Remove the fields that the flags name from a chunk."""
    if sent_flags & _ROLE:
        choice.delta = Delta()
    if sent_flags & _END:
        choice.finish_reason = None
    for bit, field in ((_PROMPT_IDS, "prompt_token_ids"), (_PROMPT_LOGPROBS, "prompt_logprobs")):
        if sent_flags & bit:
            chunk.model_fields_set.discard(field)
            choice.model_fields_set.discard(field)


def _content(choice: Choice) -> str:
    """Return the content that a chunk adds to its choice, as one string."""
    if not choice.delta.tool_calls:
        return choice.text or choice.delta.reasoning or choice.delta.content or ""
    (call,) = choice.delta.tool_calls
    function = call["function"]
    return f"\0{function['name']}{function['arguments']}" if "name" in function else str(function["arguments"])


def _keep_content(choice: Choice, left: str) -> None:
    """Replace the content of a chunk by its remainder."""
    delta = choice.delta
    if delta.tool_calls:
        more = [{"index": delta.tool_calls[0]["index"], "function": {"arguments": left}}]
        choice.delta = Delta(tool_calls=more) if left else Delta()
    elif choice.text:
        choice.text = left
    elif delta.reasoning:
        delta.reasoning = delta.reasoning_content = left
    else:
        delta.content = left


def _count(logprobs: dict[str, Any] | None) -> int:
    """Return the number of entries of ``logprobs``, in either format."""
    return 0 if logprobs is None else len(logprobs["content"] if "content" in logprobs else logprobs["tokens"])
