"""The media of prompts: from what a client gives (`headrace.media_kinds`) to items for the model's encoder, and the tokens that stand for them.

Read first: loader.py (`MediaLoader`: what is loaded at a time, what is kept), families.py (what stands for an item in a prompt).

- Bytes: sources.py (data: URLs, base64, files), fetch.py (URLs of allowed hosts)
- In child processes, started with the first item: media_messages.py, media_child.py (what a child runs)
  - of images and frames: images.py (files to pixels), processors.py (pixels to the values of transformers' image processors), resolutions.py (sizes
    and numbers of tiles)
  - of audio: audio.py (files to samples, and these to Whisper's features)
- Also: limits.py (what one item may cost, and how one is refused)
"""
