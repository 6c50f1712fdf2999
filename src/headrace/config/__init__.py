"""User options, and their resolution for one model and device.

Read first: server_options.py (the options: a table, frozen, grouped), server_args.py (the same, checked), resolve.py
(pure: options + model + device -> `Config`, and the decisions it took).

option.py (one of them, and which values it may have), checks.py (which of them can be combined, with each other, with
a device, with a kind of model), cli.py (the command line made from them, and what `--help` shows),
translate.py (options as SGLang and vLLM write them), other_servers.py and other_servers.toml (the table of those
options), settings.py (options from a file and the environment), names.py (--served-model-name, --lora-paths),
kv_events.py (--kv-events-config), nodes.py (--nnodes), media_options.py and media_args.py (media in
prompts), web.py (--allow-origins, --allowed-hosts), machine.py (what is checked of the machine without torch).
"""
