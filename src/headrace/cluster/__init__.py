"""`headrace serve --ray`: replicas of a whole engine behind Ray Serve.

Files: ray_server.py (the main process, from the options that work there to the exit code; read it first), ray_replica.py (an actor: one engine with
its processes, its application, and which routes mean the same whichever replica answers), ray_proxy.py (what the proxies of Ray Serve say when a
replica dies).

Only ray_server.py imports ray, which is an extra. What Ray carries between its processes is in Ray's own hands; requests reach a replica as HTTP.
"""
