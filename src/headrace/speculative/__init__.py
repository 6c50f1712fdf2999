"""Speculation: guessing the next tokens of a sequence, so that one step can compute several of them.

A guess ("draft") is computed like a known token, and each of its positions is sampled as it would be without it; drafts are kept as far as they
are what was sampled. So no token changes, and a guess that is wrong costs only its own computation (Y. Leviathan et al., "Fast Inference from
Transformers via Speculative Decoding", 2023; their acceptance test is here the plain comparison with the token that is drawn anyway).

- base.py: what guesses (`Drafter`), and the guesses of a step (`Drafts`). Read it first.
- ngram.py: guesses what came after the last tokens when they came before, in the sequence or in what others have said.
- forced.py: guesses what a grammar demands.
- pace.py: how many tokens are worth guessing, by how often the last guesses were right.

Drafters with weights are in `execution/drafting.py`.
"""
