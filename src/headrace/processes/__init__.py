"""What starts, watches, restarts and ends the parts of an engine, and what each of them runs.

The parent's side: `children` (or `threads` with --single-process) starts the parts, each a `child`; `supervisor` notices a death,
`recovery` starts another, and `restarts` puts the two together; `http_workers` does the same for HTTP workers. The child's side:
`child_main` is the entry, and `scheduler_process`, `detokenizer_process` and `http_process` are what runs. Both know `handshake` and
`lifeline`.
"""
