"""Garbage collection of this process."""

import gc


def freeze() -> int:
    """Collect what is garbage now and leave the rest out of later collections; how many objects that is.

    What a server holds once it is warm (tokenizer, modules, tables) stays: looking through it again and again only costs pauses.
    """
    gc.collect()
    gc.freeze()
    return gc.get_freeze_count()
