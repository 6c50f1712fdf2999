"""The images of prompts: from what a client gives to items for the model's encoder, and the tokens that stand for them.

Read first: loader.py (`MediaLoader`: what is loaded at a time, what is kept), families.py (what stands for an image in a prompt, by family).

- Bytes: sources.py (data: URLs, base64, files), fetch.py (URLs of allowed hosts)
- In child processes, started with the first image: media_pool.py (the parent's side), media_messages.py, media_child.py (what a child runs),
  images.py (files to pixels), processors.py (pixels to the values of transformers' image processors), resolutions.py (sizes and numbers of tiles)
- Also: limits.py (what one image may cost), refused.py (why it is not taken), layout.py (tokens and rows), prepared_cache.py (prepared images, and
  work that is shared)
"""
