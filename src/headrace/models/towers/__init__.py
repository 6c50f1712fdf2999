"""Layers that encoders of images and of sounds share: attention in both directions within an item, over packed items.

Read first: blocks.py (one layer), tower.py (all of them, packed without padding, in slices of work). Also patches.py (from pixels to
the first layer), clip.py (the whole of a CLIP or SigLIP tower), table.py (tensors that are added), reshaped.py (matrices that a checkpoint has in
another shape).
"""
