"""User options, and their resolution for one model and device.

Read first: server_args.py (the options: frozen, grouped), resolve.py (pure: options + model + device -> `Config`, and
the decisions it took).

option.py (one of them), bounds.py (which values an option may have), cli.py (the command line made from the options),
help_pages.py (what `--help` shows of them), translate.py (options as SGLang and vLLM write them), other_servers.py
and other_servers.toml (the table of those options), option_pages.py (its pages in docs), settings.py (options from a file and the
environment), adapters.py (--lora-paths), served_names.py (--served-model-name), kv_events.py (--kv-events-config),
nodes.py (--nnodes), process_options.py (ranks and replicas), speculation.py (guessed tokens), pooling_options.py
(models that make vectors), media_options.py and media_args.py (models that take images, sounds or videos),
combinations.py (options that need or exclude each other), web.py (--allow-origins, --allowed-hosts), open_files.py
(the limit of open files), devices.py (what is known of the machine without torch), least_memory.py (what a model takes
at least).
"""
