"""User options, and their resolution for one model and device.

Read first: server_options.py (the options: a table, frozen, grouped; bounds.py: what each is made of), server_args.py (the same, checked, and the
names in them), resolve.py (pure: options + model + device -> `Config`, and the decisions it took; precision.py is the part about bits).

checks.py (which values they may have, and which can be combined, with each other, with a device, with a kind of model),
cli.py (the command line made from them, and what `--help` shows), other_servers.py and other_servers.toml (options as SGLang
and vLLM write them), settings.py (options from a file and the environment), kv_events.py (--kv-events-config),
web.py (--allow-origins, --allowed-hosts, media in prompts), machine.py (what is checked of the machine without torch, --nnodes).
"""
