"""The calm client: it streams one short greedy answer after the other, and measures the times between tokens."""

from __future__ import annotations

import http.client
import itertools
import json
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

TOKENS = 32
_WAIT_S = 30.0  # for the next byte; then the stream counts as lost
_REFUSED_S = 0.05  # until it asks again
# Plain decoding without the tenant's texts: each token is a step, and earlier answers do not make later ones faster.
_BODY: dict[str, Any] = {
    "messages": [{"role": "user", "content": "When does the library open?"}], "max_tokens": TOKENS, "temperature": 0,
    "ignore_eos": True, "stream": True, "cache": "off", "speculation": {"max_draft_tokens": 0},
}  # fmt: skip


@dataclass(slots=True)
class Window:
    """The times and failures of some seconds."""

    gaps_s: list[float] = field(default_factory=list)  # between two events with text
    firsts_s: list[float] = field(default_factory=list)  # to the first token
    wholes_s: list[float] = field(default_factory=list)  # of a request, to its last event
    statuses: Counter[str] = field(default_factory=Counter)
    lost: int = 0  # streams without their last event
    others: int = 0  # texts that differ from the first one

    @property
    def failed(self) -> int:
        """Number of requests without a whole answer, and of answers that differ."""
        refused = self.statuses.total() - self.statuses["200"]
        return max(refused, self.lost) + self.others


class CalmClient:
    """A client with one connection, renewed when it is lost."""

    def __init__(self, host: str, port: int, model: str, key: str | None) -> None:
        self._address, self._body = (host, port), json.dumps({"model": model, **_BODY})
        self._headers = {"Content-Type": "application/json"} | ({} if key is None else {"Authorization": f"Bearer {key}"})
        self._connection: http.client.HTTPConnection | None = None
        self._text: str | None = None  # of the first answer

    def window(self, seconds: float, warm_up_s: float = 0.0) -> Window:
        """Ask for so many seconds after the warm-up, and return what was measured after it."""
        counts_from = time.monotonic() + warm_up_s
        return self.until(lambda: time.monotonic() >= counts_from + seconds, counts_from)

    def until(self, ends: Callable[[], bool], counts_from: float = 0.0) -> Window:
        """Ask until ``ends`` returns true, reading the last stream to its end."""
        found = Window()
        while not ends():
            self._ask(found, counts_from)
        return found

    def close(self) -> None:
        """Close the connection."""
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
                    text = _content(line)
                    texts.append(text)
                    times += [time.monotonic()] if text else []
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
        marks = times[1:] if ended else [*times, time.monotonic()]  # a lost stream has a gap until it broke off
        found.gaps_s += [later - at for at, later in itertools.pairwise(marks) if later >= counts_from]


def _content(line: bytes) -> str:
    event = json.loads(line.removeprefix(b"data: "))
    return "".join(choice["delta"].get("content") or "" for choice in event.get("choices") or ())
