"""Rights of Outrider's Redis user."""

from __future__ import annotations

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
