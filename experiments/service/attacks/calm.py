"""A calm client: it streams one short greedy answer after the other, and notes when its tokens come."""

from __future__ import annotations

import http.client
import itertools
import json
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

TOKENS = 32
_WAIT_S = 30.0  # for the next byte; then the stream counts as lost
_REFUSED_S = 0.05  # until it asks again
# Plain decoding without the tenant's texts: each token is a step, and answers do not become faster by what was answered before.
_BODY: dict[str, Any] = {
    "messages": [{"role": "user", "content": "When does the library open?"}], "max_tokens": TOKENS, "temperature": 0,
    "ignore_eos": True, "stream": True, "cache": "off", "speculation": {"max_draft_tokens": 0},
}  # fmt: skip


@dataclass(slots=True)
class Window:
    """What came in some seconds."""

    gaps_s: list[float] = field(default_factory=list)  # between two events with text
    firsts_s: list[float] = field(default_factory=list)  # to the first token
    wholes_s: list[float] = field(default_factory=list)  # of a request, to its last event
    statuses: Counter[str] = field(default_factory=Counter)
    lost: int = 0  # streams without their last event
    others: int = 0  # texts that are not the first one


class CalmClient:
    """One connection, made again where it is lost."""

    def __init__(self, host: str, port: int, model: str, key: str | None) -> None:
        self._address, self._body = (host, port), json.dumps({"model": model, **_BODY})
        self._headers = {"Content-Type": "application/json"} | ({} if key is None else {"Authorization": f"Bearer {key}"})
        self._connection: http.client.HTTPConnection | None = None
        self._text: str | None = None  # of the first answer

    def window(self, seconds: float, warm_up_s: float = 0.0) -> Window:
        """Ask until so many seconds are over, read the last stream to its end, and return what came after the warm-up."""
        found, counts_from = Window(), time.monotonic() + warm_up_s
        while time.monotonic() < counts_from + seconds:
            self._ask(found, counts_from)
        return found

    def close(self) -> None:
        """End the connection."""
        if self._connection is not None:
            self._connection.close()
        self._connection = None

    def _ask(self, found: Window, counts_from: float) -> None:
        times, texts, ended = [time.monotonic()], list[str](), False
        try:
            connection = self._connection = self._connection or http.client.HTTPConnection(*self._address, timeout=_WAIT_S)
            connection.request("POST", "/v1/chat/completions", self._body, self._headers)
            response = connection.getresponse()
            found.statuses[str(response.status)] += 1
            for line in response:
                ended = ended or line.startswith(b"data: [DONE]")
                if line.startswith(b"data: {"):
                    told = _content(line)
                    texts.append(told)
                    times += [time.monotonic()] if told else []
            response.read()  # or the next request is refused
            if response.status != 200:
                time.sleep(_REFUSED_S)
        except (OSError, http.client.HTTPException, ValueError) as error:
            found.statuses[type(error).__name__] += 1
            self.close()
            time.sleep(_REFUSED_S)
        self._note(found, times, "".join(texts), ended, counts_from)

    def _note(self, found: Window, times: list[float], text: str, ended: bool, counts_from: float) -> None:
        if not ended:
            found.lost += 1
        elif self._text is None:
            self._text = text
        found.others += ended and text != self._text
        if times[0] >= counts_from and len(times) > 1:
            found.firsts_s.append(times[1] - times[0])
            found.wholes_s.append(time.monotonic() - times[0])
        told = times[1:] if ended else [*times, time.monotonic()]  # it broke off: the time until then is a gap
        found.gaps_s += [later - at for at, later in itertools.pairwise(told) if later >= counts_from]


def _content(line: bytes) -> str:
    event = json.loads(line.removeprefix(b"data: "))
    return "".join(choice["delta"].get("content") or "" for choice in event.get("choices") or ())
