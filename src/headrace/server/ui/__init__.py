"""The web pages of the server: one to chat, one to watch, one to try the API. They are plain files
and use the HTTP API as any client does.

- pages.py: the files in memory, compressed, and their routes
- static/: the pages themselves (ES modules written by hand, without a build step); static/vendor/: two libraries, unchanged, listed in
  static/vendor/SOURCES.json
"""
