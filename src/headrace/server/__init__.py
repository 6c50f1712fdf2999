"""The HTTP surface: routes, authentication, the protocols of several APIs, server-sent events.

Read first: app.py, route_table.py (a row for each endpoint), context.py (what handlers get), http.py (one exchange), request_frontend.py (what
a server needs of an engine, and how an HTTP worker reaches it).

- The socket: address.py (it and its certificate), listener.py (uvicorn, and limits of a connection)
- Around a handler: routes.py (a row of the table, /openapi.json), middleware.py (ids, counts, web pages), auth.py (keys), body.py (JSON and its
  limits), sse.py (streams), notes.py (headers about how a request was read), error_forms.py (what errors look like in each API)
- Handlers: native.py, control.py, cache.py (pins), infill.py (also what other APIs need to fill in the middle), weights.py, pooling/; those of
  openai/, responses/, anthropic/ and ollama/, with chat/ for the chats of all
- Web pages: ui/
"""
