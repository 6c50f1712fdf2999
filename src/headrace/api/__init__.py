"""The Python API: `Engine` (a model in this process and its children) and `Runtime` (a client that owns a server)."""
