"""--nnodes, --node-rank, --dist-init-addr and the secret: from options, from LeaderWorkerSet's variables, and what is refused."""

import os

import pytest

from headrace.config.machine import dist_secret, host_and_port, with_nodes
from headrace.config.server_args import ServerArgs
from headrace.errors import ConfigError
from headrace.processes.rank_groups import descriptors_of, ranks_here, starts_here

LWS = {"LWS_GROUP_SIZE": "2", "LWS_WORKER_INDEX": "1", "LWS_LEADER_ADDRESS": "engine-0.engine.default"}
TWO = {"nnodes": 2, "tp_size": 4, "node_rank": 1, "dist_init_addr": "a:1"}


def nodes(args: ServerArgs) -> tuple[object, ...]:
    return args.nnodes, args.node_rank, args.dist_init_addr


def test_without_options_or_variables_there_is_one_node():
    assert nodes(with_nodes(ServerArgs(), {})) == (1, 0, None)


def test_variables_of_leaderworkerset_are_fall_backs():
    assert nodes(with_nodes(ServerArgs(tp_size=2), LWS)) == (2, 1, "engine-0.engine.default:20000")
    assert nodes(with_nodes(ServerArgs(**TWO), LWS)) == (2, 1, "a:1")
    assert nodes(with_nodes(ServerArgs(nnodes=1), LWS)) == (1, 0, None)


def test_what_was_resolved_stays_as_it_is():
    once = with_nodes(ServerArgs(tp_size=2), LWS)
    assert with_nodes(once, {}) == once


def test_each_node_has_as_many_ranks_in_order():
    assert [list(ranks_here(ServerArgs(**TWO | {"node_rank": rank}))) for rank in (0, 1)] == [[0, 1], [2, 3]]


def test_each_node_has_whole_stages_whose_ranks_share_memory_there():
    """Four stages of three ranks on two nodes: six ranks each, which share two memories. Links lead to another node where a node's stages end."""
    for node in (0, 1):
        args = with_nodes(ServerArgs(**TWO | {"tp_size": 3, "pp_size": 4, "node_rank": node}), {})
        starts = starts_here(args)
        try:
            assert [start.rank for start in starts] == list(range(6 * node, 6 * node + 6))
            assert {start.group_fd for start in starts} == {None}
            first, second = {start.shard_fd for start in starts[:3]}, {start.shard_fd for start in starts[3:]}
            assert len(first) == len(second) == 1
            assert None not in first | second
            assert first != second
            assert [start.before_fd is None for start in starts] == [True] * 3 + [False] * 3
            assert [start.after_fd is None for start in starts] == [False] * 3 + [True] * 3
        finally:
            for fd in descriptors_of(starts):
                os.close(fd)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"tp_size": 3}, "--tp-size 3 .* multiple of --nnodes 2"),
        ({"pp_size": 3}, "--pp-size 3 .* multiple of --nnodes 2, .* use --tp-size without --pp-size"),
        ({"node_rank": 2}, "--node-rank 2 of --nnodes 2"),
        ({"node_rank": None}, "needs --node-rank"),
        ({"dist_init_addr": None}, "needs --dist-init-addr HOST:PORT"),
        ({"dist_init_addr": "a:b"}, "must be HOST:PORT"),
        ({"dist_init_addr": "a:99999"}, "must be HOST:PORT"),
        ({"dp_size": 2}, "--dp-size cannot be combined with --nnodes"),
        (
            {"dp_size": 2, "tp_size": 2, "enable_dp_attention": True},
            "--enable-dp-attention cannot be combined with --nnodes",
        ),
        (
            {"tp_size": 2, "enable_two_batch_overlap": True},
            "--enable-two-batch-overlap needs ranks that sum in the mem",
        ),
        ({"nnodes": None}, "give --nnodes, too"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(options, said):
    with pytest.raises(ConfigError, match=said):
        with_nodes(ServerArgs(**TWO | options), {})


@pytest.mark.parametrize(
    ("text", "found"),
    [("a:5", ("a", 5)), ("a", ("a", 20000)), ("[::1]:5", ("::1", 5)), ("::1", ("::1", 20000)), ("tcp://a:5", ("a", 5))],
)
def test_addresses_are_read(text, found):
    assert host_and_port(text) == found


def test_the_secret_comes_from_the_file_or_the_variable(tmp_path):
    file = tmp_path / "secret"
    file.write_text("0123456789abcdef-of-file\n")
    variable = {"HEADRACE_DIST_SECRET": "0123456789abcdef-of-variable"}
    assert dist_secret(ServerArgs(), variable) == b"0123456789abcdef-of-variable"
    assert dist_secret(ServerArgs(dist_secret_file=str(file)), variable) == b"0123456789abcdef-of-file"


@pytest.mark.parametrize(
    ("file", "variable", "said"),
    [
        (None, "", "needs a secret: .*HEADRACE_DIST_SECRET or --dist-secret-file"),
        (None, "short", "5 bytes, fewer than 16"),
        ("", "0123456789abcdef", "needs a secret"),
        ("missing", "", "cannot be read: No such file"),
    ],
)
def test_without_a_good_secret_nothing_starts(tmp_path, file, variable, said):
    if file == "":
        (tmp_path / "empty").touch()
    name = {None: None, "": str(tmp_path / "empty")}.get(file, str(tmp_path / "missing"))
    with pytest.raises(ConfigError, match=said):
        dist_secret(ServerArgs(dist_secret_file=name), {"HEADRACE_DIST_SECRET": variable})
