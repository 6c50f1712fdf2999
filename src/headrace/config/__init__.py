"""User options (`server_args`), and their resolution for one model and device (`resolve`)."""
