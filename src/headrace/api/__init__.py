"""What a Python program uses: `Engine` (a model in this process and its children) and `Runtime` (a client that owns a server)."""
