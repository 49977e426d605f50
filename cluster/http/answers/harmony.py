"""Parser of GPT-OSS's harmony format: messages in channels, split into reasoning, text and function calls."""

# A message is `<|channel|>NAME<|message|>TEXT`, ended by `<|end|>` or the end of the output; the next one begins with
# `<|start|>assistant`. The part before `<|message|>` is the header. It may name a recipient (`to=functions.look`), before or
# after the channel, and the type of the text (https://cookbook.openai.com/articles/openai-harmony). The package openai-harmony is
# not used: it parses token ids of the vocabulary o200k_harmony, which it downloads, and not those of the served tokenizer.

from __future__ import annotations

import json
import re
from collections.abc import Collection
from typing import Literal

from outrider.cluster.http.answers.call_parts import Call
from outrider.cluster.http.answers.reasoning import Thought
from outrider.cluster.http.answers.tool_calls import Arguments
from outrider.engine.text.chat_format import CALL_MARKS

_MARKS = CALL_MARKS["harmony"]
_MARK = re.compile("|".join(map(re.escape, _MARKS)))
_WORDS = ("assistant", "analysis", "commentary", "final", "json")
_ROLE = re.compile(r"\s*(?:assistant)?\s*(?:t|to|to=\S*\s*)?")  # valid text before the first mark of a header, may be cut
_RECIPIENT, _CHANNEL = re.compile(r"to=([^\s<]+)"), re.compile(r"<\|channel\|>\s*(\w+)")
_HEADER = re.compile(
    r"\s*(?:assistant)?\s*(?:to=[^\s<]*)?\s*(?:<\|channel\|>\s*(?:(?:analysis|commentary|final)\b)?)?\s*(?:to=[^\s<]*)?\s*"
    r"(?:<\|constrain\|>)?\s*(?:json\b)?\s*"
)
_LONGEST = 300  # maximum characters of a header; anything longer is text

Kind = Literal["thought", "text", "call", "dropped"]


class HarmonyReader:
    """Incremental parser of harmony output: channel ``analysis`` is reasoning, a message to a function a call, the rest text.

    Example: ``push("<|channel|>analysis<|message|>Two")`` gives ``[Thought("Two")]``, and then
    ``push("<|end|><|start|>assistant to=functions.f<|channel|>commentary json<|message|>{")`` gives
    ``[Call("f", ""), Arguments("{")]``.
    """

    is_over = False  # reasoning may follow at any time
    has_thought = False

    def __init__(
        self, begins_within: bool | None, reads_calls: bool = False, most: int | None = None, names: Collection[str] = ()
    ) -> None:
        """Set the state at the end of the prompt.

        Args:
            begins_within: true if the prompt ends in channel ``analysis``, false for ``final``; None: before a header.
            reads_calls: parse messages to functions as calls instead of text.
            most: maximum calls to report, later ones are dropped; None for no limit.
            names: of the tools; messages to other functions are text. Empty for any.
        """
        self._names = names
        self._kind: Kind | None = None if begins_within is None else "thought" if begins_within else "text"  # None in a header
        self._reads_calls, self._most, self._calls = reads_calls, most, 0
        self._held = self._header = ""
        self._arguments = ""  # of the last call
        self._said: set[Kind] = set()  # kinds of the earlier non-empty messages
        self._is_first = True  # no text of the current message was emitted yet

    @property
    def is_within(self) -> bool | None:
        """Return whether the next text is reasoning; None within a header."""
        return None if self._kind is None else self._kind == "thought"

    @property
    def ends_in_call(self) -> bool:
        """Return whether the text ended before the arguments of a call were complete."""
        if self._kind != "call":
            return False
        try:
            json.loads(self._arguments)
        except ValueError:
            return True
        return False

    def push(self, text: str) -> list[str | Thought | Call | Arguments]:
        """Parse more text and return the new parts, none of them empty."""
        self._held += text
        found: list[str | Thought | Call | Arguments] = []
        while (mark := _MARK.search(self._held)) is not None:
            before, self._held = self._held[: mark.start()], self._held[mark.end() :]
            self._take(before, found)
            self._end(mark[0], found)
        # The end of the text may be the beginning of a mark: hold it back.
        place = self._held.rfind("<")
        unsure = place >= 0 and any(mark.startswith(self._held[place:]) for mark in _MARKS)
        sure, self._held = (self._held[:place], self._held[place:]) if unsure else (self._held, "")
        self._take(sure, found)
        return found

    def finish(self) -> list[str | Thought | Call | Arguments]:
        """Return the parts that were held back. Call it when the text has ended."""
        found: list[str | Thought | Call | Arguments] = []
        self._take(self._held, found)
        self._held = ""
        if self._kind is None:
            self._say_header(found)
        return found

    def _take(self, text: str, found: list[str | Thought | Call | Arguments]) -> None:
        if self._kind is not None:
            self._say(text, found)
            return
        # Malformed output is text: a header that is too long, or does not begin like one.
        room = _LONGEST - len(self._header)
        self._header, rest = self._header + text[:room], text[room:]
        if _MARK.search(self._header) is None and not (
            "assistant".startswith(self._header.lstrip()) or _ROLE.fullmatch(self._header)
        ):
            self._kind, said = "text", self._header
            self._say(said + rest, found)
        elif rest:
            self._say_header(found)
            self._say(rest, found)

    def _end(self, mark: str, found: list[str | Thought | Call | Arguments]) -> None:
        if self._kind is None and mark in ("<|channel|>", "<|constrain|>"):
            self._header += mark
        elif self._kind is None and mark == "<|message|>":
            self._begin(found)
        elif mark in ("<|message|>", "<|constrain|>"):  # within a text
            self._say(mark, found)
        else:
            if self._kind is None:
                self._say_header(found)
            self._kind, self._is_first, self._header = None, True, mark if mark == "<|channel|>" else ""

    def _begin(self, found: list[str | Thought | Call | Arguments]) -> None:
        """Begin the text of a message, after its complete header."""
        recipient = _RECIPIENT.search(self._header)
        name = recipient[1].removeprefix("functions.") if recipient and recipient[1].startswith("functions.") else ""
        if name and self._reads_calls and (not self._names or name in self._names):
            self._kind = "call" if self._most is None or self._calls < self._most else "dropped"
            if self._kind == "call":
                self._calls += 1
                self._arguments = ""
                found.append(Call(name, ""))
        else:
            self._kind = self._channel()
        self._header = ""

    def _channel(self) -> Kind:
        channel = _CHANNEL.search(self._header)
        return "thought" if channel is not None and channel[1] == "analysis" else "text"

    def _say_header(self, found: list[str | Thought | Call | Arguments]) -> None:
        """Emit a header without a message as text, except for its keywords, of which the last may be cut."""
        head = _HEADER.match(self._header)
        left = self._header[head.end() if head else 0 :]
        self._kind = self._channel()
        if not any(word.startswith(left) for word in _WORDS):
            self._say(left, found)
        self._header = ""

    def _say(self, text: str, found: list[str | Thought | Call | Arguments]) -> None:
        kind = self._kind
        if not text or kind is None or kind == "dropped":
            return
        if kind == "call":
            self._arguments += text
            found.append(Arguments(text))
            return
        # A blank line separates messages of the same kind.
        if self._is_first and kind in self._said:
            text = f"\n\n{text}"
        self._is_first = False
        self._said.add(kind)
        found.append(Thought(text) if kind == "thought" else text)
