"""What the server counts and measures, how it is exported, and watchdogs over its loops."""
