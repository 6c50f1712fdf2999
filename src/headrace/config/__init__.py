"""User options (`server_args`) and what becomes of them for one model and device (`resolve`)."""
