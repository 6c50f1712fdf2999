"""Decides what each step computes and what became of it. No torch: it sees tokens, pages and counts."""
