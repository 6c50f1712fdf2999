"""KV of prompts that one server computes and another goes on with (`--disaggregation-mode`): what the two say to each other.

Read first: wire.py (frames, and how a connection begins), then source.py (the prefill side, which listens) and sink.py (the decode side, which
connects and asks). shared_memory.py: pages of servers on one machine. Which requests wait for what is in `scheduler/rooms.py`. No torch.
"""
