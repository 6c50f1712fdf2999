"""What belongs to one family of models alone: a module for each, found by its name. No other room has a family's name.

A family is a file, or a folder where it has code of its own that needs torch. `headrace.families.<name>` has `FAMILY`
(`checkpoint/family.py`): the model types, defaults of config.json, options of the shared layers, names in GGUF files, how images
and sounds are read from config.json, and which tokens stand for them. It imports no torch. In a folder, `vision.py` or `audio.py`
has the encoder of images or audio on the layers of `models/towers.py`. `checkpoint/families.py` finds the families; nothing else
needs a line for a new one.
"""
