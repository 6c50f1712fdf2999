"""The outline of a prefix cache, for people who look at it: how its tree branches, without a token of its text."""

import msgspec


class CacheNode(msgspec.Struct, frozen=True, gc=False):
    """A node: the tokens of the edge that leads to it.

    parent: index of its parent among the nodes listed; -1: it begins a prompt. num_tokens: of the edge. num_children: also those that are not
    listed. num_leases: how many running requests pin it.
    """

    parent: int
    num_tokens: int
    num_children: int
    num_leases: int


class CacheTree(msgspec.Struct, frozen=True):
    """The upper part of a replica's tree; parents come before their children. num_nodes, num_tokens: of the whole tree."""

    replica: int = msgspec.field(name="dp_rank")
    num_nodes: int
    num_tokens: int
    nodes: list[CacheNode]
