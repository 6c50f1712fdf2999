"""What this process no longer uses: garbage collection, and free memory given back."""

import atexit
import ctypes
import gc


def freeze() -> int:
    """Collect what is garbage now and leave the rest out of later collections; how many objects that is.

    What a server holds once it is warm (tokenizer, modules, tables) stays: looking through it again and again only costs pauses.
    At the process's end it counts again, so that extension modules see their objects go.
    """
    gc.collect()
    gc.freeze()
    atexit.unregister(gc.unfreeze)
    atexit.register(gc.unfreeze)
    return gc.get_freeze_count()


def give_back_free_memory() -> None:
    """Return to the system what malloc keeps of freed memory, such as the temporaries of loading. Does nothing where libc cannot."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
