"""What a Python program uses: `Engine` (the runtime in this process) and `Runtime` (a client that owns a server)."""
