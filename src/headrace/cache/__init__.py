"""Who owns which KV page, and which prefixes are known. Host integers only: no torch.

Read first: base.py (free pages, the interface of a prefix cache, and one that shares nothing).

radix_cache.py (the tree of prefixes), events.py (what the tree stores and evicts, for routers), tier.py (KV that is kept behind the tree),
page_files.py (its files), host_pages.py (memory of the host before them).
"""
