"""What the process of a follower runs, from loading its part of the model to the last step: `run_follower`."""

from headrace.config.server_args import ServerArgs
from headrace.processes.handshake import OnProgress, OnReady, RankStart
from headrace.processes.numa import bind
from headrace.processes.share import share_of_machine


def run_follower(args: ServerArgs, on_ready: OnReady, on_progress: OnProgress, rank: RankStart) -> None:
    """Run the leader's steps until it says that there are no more.

    on_progress: called once, if the leader waits for the weights.
    Raises ConfigError or ModelError before `on_ready`, and ExecutionError when the group of the ranks breaks.
    """
    bindings = [] if rank.binding is None else [rank.binding]
    for binding in bindings:
        bind(binding)
    from headrace.execution.build import build_follower  # imports torch, which takes longest
    from headrace.execution.ranks import follow, group_of
    from headrace.processes.rank_groups import joined_follower

    with joined_follower(args, rank) as own:
        group = group_of(own)

        def on_loaded() -> None:
            on_progress(1, 1)
            group.ready()

        runner, resources = build_follower(share_of_machine(args, bindings), own, on_loaded)
        with resources:
            on_ready(None)
            group.ready()
            follow(runner, group)
