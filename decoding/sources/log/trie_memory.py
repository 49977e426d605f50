"""Scratch arrays of a retrieval from the implicit trie: its nodes, and the occurrences below them."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from decoding.budget.candidates import HASH_SLOTS, Float64Array
from decoding.jit import compiled
from decoding.sources.log.chains import Int64Array
from decoding.tree import Int32Array

MAX_NODES = 16384  # looked at in one retrieval
MAX_FOUND = 8192  # occurrences
# Frequencies to go by. Mixed, an occurrence in the prompt counts 9,999 times one in an output.
INPUT, OUTPUT, MIXED = range(3)
# Columns of a node: its token, node above (-1 below the root), depth, row in the draft (-1 for none), first occurrence, first
# child (-1: not looked at) and number of children.
TOKEN, PARENT, DEPTH, ROW, FIRST, CHILDREN, COUNT = range(7)
# Columns of an occurrence: its slot in the log, where that is (0: the prompt, 1: a reference, 2: the log of the tenant's outputs,
# 3: the public log), and the next occurrence of the same node; and a token further on, see ``occurrences``.
SLOT, PLACE, LINK, AHEAD = range(4)


class Nodes(NamedTuple):
    """Working memory of a retrieval, kept between calls: few arrays, as passing one costs time, and a node in one cache line."""

    nodes: Int32Array  # [nodes, 8]
    frequencies: Float64Array  # [3, nodes] prompt's, outputs', mixed
    heap: Int32Array  # [nodes + 1]
    queue: Int32Array  # [nodes]
    slots: Int32Array  # [HASH_SLOTS]
    found: Int32Array  # [occurrences, 4]
    positions: Int64Array  # [occurrences]
    lengths: Int32Array  # [occurrences] agreement

    @classmethod
    def empty(cls) -> Nodes:
        """Memory for one thread."""
        return cls(
            nodes=np.empty((MAX_NODES, 8), np.int32),
            frequencies=np.empty((3, MAX_NODES)),
            heap=np.empty(MAX_NODES + 1, np.int32),
            queue=np.empty(MAX_NODES, np.int32),
            slots=np.full(HASH_SLOTS, -1, np.int32),
            found=np.empty((MAX_FOUND, 4), np.int32),
            positions=np.empty(MAX_FOUND, np.int64),
            lengths=np.empty(MAX_FOUND, np.int32),
        )


# ``Nodes`` as a plain tuple, which is passed to compiled code in half the time.
PlainNodes = tuple[Int32Array, Float64Array, Int32Array, Int32Array, Int32Array, Int32Array, Int64Array, Int32Array]


@compiled
def add_node(nodes: Int32Array, frequencies: Float64Array, node: int, token: int, parent: int, depth: int) -> None:
    """Writes a node that is in no row, has no occurrence, and was not looked at."""
    nodes[node, TOKEN], nodes[node, PARENT], nodes[node, DEPTH] = token, parent, depth
    nodes[node, ROW], nodes[node, FIRST], nodes[node, CHILDREN], nodes[node, COUNT] = -1, -1, -1, 0
    frequencies[INPUT, node] = frequencies[OUTPUT, node] = frequencies[MIXED, node] = 0.0
