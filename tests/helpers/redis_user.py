"""The rights of Outrider's Redis user, as the documents and the manifests say them."""

from __future__ import annotations

from outrider.cache_service.store.redis_store import Head, RedisStore

A, B = "a" * 32, "b" * 32  # namespaces

# What a Redis user needs; the last line only behind Cluster and Sentinel addresses and for a database other than 0.
ACL_COMMANDS = (
    "+ping", "+eval", "+xadd", "+xread", "+xtrim", "+xlen", "+xinfo|stream", "+memory|usage",
    "+info", "+bgrewriteaof", "+get", "+set", "+incr",
    "+expire", "+persist", "+exists", "+hset", "+hget", "+hmget", "+del", "+unlink",
    "+select", "+command", "+cluster|slots",
)  # fmt: skip


def acl_rule(prefix: str) -> str:
    """The rule of a Redis user that may use the keys of one prefix, with the commands that are needed, and nothing else.

    >>> acl_rule("outrider")[:32]
    'resetkeys ~{outrider}:* resetcha'
    """
    return f"resetkeys ~{{{prefix}}}:* resetchannels -@all {' '.join(ACL_COMMANDS)}"


def use_every_command(store: RedisStore) -> None:
    """Uses every command once."""
    (id,) = store.append([(A, b"x")])
    assert store.read({A: "0-0"}, 0.01, 5) == {A: [(id, b"x")]}
    assert store.save_snapshot(A, id, b"s" * (2 << 20), epoch=0) and store.load_snapshot(A) == (id, b"s" * (2 << 20))
    assert store.save_snapshot(A, id, b"again")
    assert store.trim(A, id, exact=True) == store.trim(A, id, exact=False) == 0
    assert store.heads([A, B])[A] == Head(id, id, id, 0)
    assert store.usage(A).stream_entries == 1
    store.keep([A, B], 60.0)
    assert store.delete(A) == 1 and store.raise_epoch(A, 5) == 5
    assert store.acquire("l", "me", 5) and store.acquire("l", "me", 5) and not store.acquire("l", "you", 5)
    store.release("l", "me")
    assert store.rewrite_files()
    store.ping()
