"""Decides what each step computes, and applies the results. No torch: it handles tokens, pages and counts."""
