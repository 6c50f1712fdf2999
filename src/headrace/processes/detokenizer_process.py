"""What the detokenizer process runs. Also the body of its thread with --single-process."""

from headrace.config.server_args import ServerArgs
from headrace.messages.channel import Channels
from headrace.messages.fan_out import FanOutSender
from headrace.metrics.watchdog import Watchdog
from headrace.processes.handshake import OnProgress, OnReady
from headrace.processes.model_files import open_tokenizer


def run_detokenizer(args: ServerArgs, channels: Channels, on_ready: OnReady, on_progress: OnProgress) -> None:
    """Turn token ids into text until a ShutdownReq. Raises ModelError before `on_ready`."""
    from headrace.text.detokenizer_manager import DetokenizerManager

    receiver = channels.receiver("to_detokenizer")
    watchdog = Watchdog("detokenizer", args.soft_watchdog_timeout_s)
    manager = DetokenizerManager(
        open_tokenizer(args),
        channels.sender("to_tokenizer"),
        FanOutSender([channels.sender("to_scheduler", replica) for replica in range(args.num_replicas)]),
        enable_faults=args.enable_fault_injection,
        watchdog=watchdog,
    )
    watchdog.start()
    on_ready(None)
    manager.run(receiver, heartbeats=not args.single_process)
    watchdog.stop()
