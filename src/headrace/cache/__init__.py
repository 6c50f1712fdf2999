"""Who owns which KV page, and which prefixes are known. Host integers only: no torch."""
