"""The HTTP surface: routes, authentication, the protocols of several APIs, server-sent events.

Read first: app.py, route_table.py (a row for each endpoint), context.py (what handlers get), http.py (one exchange), request_frontend.py (what
a server needs of an engine).

- The socket: address.py, listener.py, connection.py, tls.py
- Around a handler: routes.py (a row of the table), auth.py, keys.py, origin_gate.py (web pages, Host), request_id.py,
  request_counter.py, body.py (limits of a body), embeds_body.py, output_limit.py, sse.py,
  notes.py (headers about how a request was read), error_forms.py (what errors look like in each API),
  openapi.py (/openapi.json)
- Chats of any API: chat/; what is between a prompt and a suffix: fill_in_middle.py, infill.py
- Handlers: native.py, control.py, lora.py, weights.py, sessions.py, diagnostics.py; those of openai/, responses/, anthropic/ and ollama/
- Web pages: ui/
- In an HTTP worker: remote_frontend.py
"""
