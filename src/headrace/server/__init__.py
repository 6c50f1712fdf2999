"""The HTTP surface: routes, authentication, OpenAI and native protocols, server-sent events."""
