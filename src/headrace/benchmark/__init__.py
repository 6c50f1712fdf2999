"""Measuring a server from outside (`serving`) and an Engine from inside (`offline`). No torch."""
