"""Whatever happens to batches on their way, every cache client and the service end up with the same texts: those of the model."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.cache_service.client.inbox import Inbox
from outrider.cache_service.records import CacheDelta, TextBatch, decode_batch, encode_batch
from outrider.cache_service.server.snapshot import decode_snapshot, encode_snapshot
from outrider.cache_service.texts import AdmittedBatch, Ledger, TenantTexts
from outrider.decoding.sources.history import Histories

VOCAB = 500
LENGTH = 24  # of a text; its first token tells which it is
Kept = dict[int, list[int]]


def tokens_of(text: int) -> np.ndarray:
    """A text begins with a token of its own and goes on like others."""
    return np.array([100 + (text >> 16), *((text % 3) * 40 + at % 7 for at in range(1, LENGTH))], np.int32)


class ReplayClient:
    """Cache client that reads a stream without threads."""

    def __init__(self) -> None:
        self.ledger, self.cursor = Ledger(), 0
        memory = Histories(1 << 12)
        history = memory.of("t")
        assert history is not None
        self.history, self.inbox = history, Inbox(memory)

    def apply(self, admitted: AdmittedBatch, reload: bool = False) -> None:
        self.inbox.put("t", admitted, reload)
        while self.inbox.apply(1 << 20):
            pass

    def read(self, stream: list[bytes], count: int) -> None:
        for data in stream[self.cursor : self.cursor + count]:
            self.apply(self.ledger.admit(decode_batch(data, VOCAB)))
        self.cursor = min(len(stream), self.cursor + count)

    def reload(self, snapshot: bytes) -> None:
        decoded = decode_snapshot(snapshot)
        admitted = self.ledger.admit_snapshot(decoded)
        if admitted is not None:
            self.apply(AdmittedBatch(admitted.cleared, admitted.removed, (), admitted.deltas), reload=True)
            self.cursor = int(decoded.stream_id.split("-")[1])

    def kept(self) -> Kept:
        log = self.history.log
        texts = [log.tokens_of(number).tolist() for number in np.unique(log.arrays.owners) if number >= 0]
        kept = {tokens[0] - 100: tokens for tokens in texts if tokens}
        assert len(kept) == sum(map(bool, texts)), "a text is there once"
        return kept


class World:
    """A writer that is also the first cache client, two more cache clients, a service, and a lossless stream between them."""

    def __init__(self) -> None:
        self.clients = [ReplayClient(), ReplayClient(), ReplayClient()]
        self.service, self.position, self.now_s = TenantTexts(), 0, 0.0
        self.flying: list[bytes] = []  # written, and not in the stream yet
        self.stream: list[bytes] = []
        self.snapshots = [encode_snapshot(self.service.snapshot("0-0", VOCAB, "ab", 0.0))]
        self.growing: dict[int, int] = {}  # text -> tokens so far
        self.epoch = self.requests = self.sequence = 0  # deletions of the tenant; requests so far; batches of the writer
        self.seen = 0  # the epoch that the writer knows

    def do(self, name: str, first: int, second: int) -> None:
        self.now_s += 1.0
        getattr(self, name)(first, second)

    def write(self, epoch: int, **content: tuple[object, ...]) -> None:
        self.sequence += 1
        self.flying.append(encode_batch(TextBatch(7, self.sequence, epoch, **content), VOCAB))  # type: ignore[arg-type]

    def grow(self, first: int, second: int) -> None:
        """The next piece of a text of the writer, which drafts from it at once, before anybody else."""
        writer = self.clients[0]
        if first % 5 == 0 or not self.growing:
            self.requests += 1
            self.growing[self.requests << 16 | first % 2] = 0
            writer.history.start(self.requests << 16 | first % 2)
        text = list(self.growing)[first % len(self.growing)]
        start, end = self.growing[text], min(LENGTH, self.growing[text] + second % 8)
        piece, final = tokens_of(text)[start:end], end == LENGTH or second % 7 == 5
        writer.history.extend(text, start, piece, final)
        self.write(writer.ledger.epoch, deltas=(CacheDelta(text, start, piece, final),))
        self.growing[text] = end
        if final:
            del self.growing[text]

    def deliver(self, first: int, second: int) -> None:
        """Some batch of those on the way, not the oldest."""
        for _ in range(1 + second % 4):
            if self.flying:
                self.stream.append(self.flying.pop(first % len(self.flying)))

    def repeat(self, first: int, second: int) -> None:
        if self.stream:
            self.flying.append(self.stream[first % len(self.stream)])

    def delete_request(self, first: int, second: int) -> None:
        if self.requests:
            self.write(self.epoch, removed=(1 + first % self.requests,))

    def delete_tenant(self, first: int, second: int) -> None:
        if first % 3 == 0:
            self.epoch += 1
            self.write(self.epoch)

    def serve(self, first: int, second: int) -> None:
        for data in self.stream[self.position : self.position + 1 + second]:
            self.service.apply(decode_batch(data, VOCAB), self.now_s)
        self.position = min(len(self.stream), self.position + 1 + second)

    def evict(self, first: int, second: int) -> None:
        keys = self.service.evict(self.service.num_tokens * (second % 4) // 4, 20.0, self.now_s)
        self.write(self.service.ledger.epoch, evicted=tuple(keys))

    def snapshot(self, first: int, second: int) -> None:
        taken = self.service.snapshot(f"0-{self.position}", VOCAB, "ab", self.now_s)
        self.snapshots.append(encode_snapshot(taken))

    def restart_service(self, first: int, second: int) -> None:
        decoded = decode_snapshot(self.snapshots[-1])
        self.service, self.position = TenantTexts.restore(decoded), int(decoded.stream_id.split("-")[1])

    def read(self, first: int, second: int) -> None:
        client = self.clients[first % 3]
        client.read(self.stream, 1 + second)
        self.abandon()

    def reload(self, first: int, second: int) -> None:
        self.clients[first % 3].reload(self.snapshots[-1 - second % len(self.snapshots)])
        self.abandon()

    def abandon(self) -> None:
        """The writer writes no more of what it wrote before it learned of a deletion of the tenant."""
        if self.clients[0].ledger.epoch > self.seen:
            self.seen = self.clients[0].ledger.epoch
            self.growing.clear()

    def settle(self) -> None:
        """Everything arrives."""
        self.stream += self.flying
        self.flying = []
        for client in self.clients:
            client.read(self.stream, len(self.stream))
        self.serve(0, len(self.stream))

    def model(self) -> Kept:
        """What is left, from the set of all batches alone: no order, no state."""
        batches = [decode_batch(data, VOCAB) for data in self.stream]
        batches = [batch for batch in batches if batch.epoch == max(batch.epoch for batch in batches)]
        removed = {request for batch in batches for request in batch.removed}
        evicted = {text for batch in batches for text in batch.evicted}
        places: dict[int, set[int]] = {}
        for delta in (delta for batch in batches for delta in batch.deltas):
            if delta.text >> 16 not in removed and delta.text not in evicted:
                places.setdefault(delta.text, set()).update(range(delta.offset, delta.offset + len(delta.tokens)))
        gapless = {text: next(at for at in range(LENGTH + 1) if at not in there) for text, there in places.items()}
        return {text >> 16: tokens_of(text)[:length].tolist() for text, length in gapless.items() if length}


# What happens often stands here often.
OPERATIONS = st.sampled_from(
    ["grow"] * 6 + ["deliver"] * 4 + ["repeat", "serve", "read"] * 3 + ["evict", "snapshot", "restart_service", "reload"] * 2
    + ["delete_request", "delete_tenant"]
)  # fmt: skip


@pytest.mark.slow
@settings(max_examples=120)
@given(st.lists(st.tuples(OPERATIONS, st.integers(0, 20), st.integers(0, 20)), min_size=40, max_size=100))
def test_cache_clients_service_and_model_agree(operations: list[tuple[str, int, int]]) -> None:
    world = World()
    for name, first, second in operations:
        world.do(name, first, second)
    world.settle()
    expected = world.model()
    service = {key >> 16: text.tokens.tolist() for key, text in world.service.texts.items() if text.length}
    assert service == expected
    for client in world.clients:
        assert client.kept() == expected
    restored = TenantTexts.restore(decode_snapshot(encode_snapshot(world.service.snapshot("0-1", VOCAB, "ab", 0.0))))
    assert {key: (text.tokens.tolist(), text.final) for key, text in restored.texts.items()} == {
        key: (text.tokens.tolist(), text.final) for key, text in world.service.texts.items()
    }
    assert restored.num_tokens == world.service.num_tokens == sum(text.num_tokens for text in restored.texts.values())


def test_the_scenario_reaches_what_it_is_about() -> None:
    """A fixed course with every operation: so that the agreement above is not one of empty tables."""
    world = World()
    course = [("grow", 0, 5)] * 6  # six texts of five tokens
    course += [("deliver", 1, 3), ("serve", 0, 20), ("snapshot", 0, 0), ("deliver", 1, 3), ("repeat", 0, 0), ("serve", 0, 20)]
    course += [("read", 1, 1), ("reload", 1, 0), ("delete_request", 4, 0), ("evict", 0, 3), ("grow", 0, 7), ("grow", 1, 7)]
    course += [("deliver", 0, 3), ("restart_service", 0, 0), ("read", 2, 20), ("reload", 2, 0)]
    for name, first, second in course:
        world.do(name, first, second)
    world.settle()
    batches = [decode_batch(data, VOCAB) for data in world.stream]
    assert any(batch.removed for batch in batches) and any(batch.evicted for batch in batches)
    assert sorted(map(len, world.model().values())) == [5, 5, 5, 14]
    assert [client.kept() for client in world.clients] == [world.model()] * 3
    world.do("delete_tenant", 0, 0)
    world.settle()
    assert world.model() == {} and [client.kept() for client in world.clients] == [{}] * 3 and world.service.num_tokens == 0
