"""Who owns which KV page, and which prefixes are known. Host integers only: no torch.

Read first: base.py (the interface of a prefix cache).

allocator.py (free pages), radix_cache.py (the tree of prefixes), chunk_cache.py (nothing is shared), events.py
(what the tree stores and evicts, for routers).
"""
