"""Garbage collection, and returning free memory to the system."""

import atexit
import ctypes
import gc
import itertools
import time
from collections.abc import Callable


def pause() -> None:
    """Collect nothing until `settle`: a process that starts makes objects by the hundred thousand (modules, the vocabulary), which stay, and looking
    through them again and again is a fifth of the time that its imports take."""
    gc.disable()


def settle() -> None:
    """Collect once what the start has left, give its memory back, exclude what remains from later collections, and collect again from now on."""
    gc.collect()
    gc.freeze()
    gc.enable()
    give_back_free_memory()


def in_small_parts(
    clock: Callable[[], float] = time.monotonic, *, all_every: int = 600, trim_every: int = 10
) -> Callable[[], None]:
    """Nothing is collected by itself any more. Returns what does it, to be called often: once a second what was made since, after every `all_every`
    seconds all. After every `trim_every` free memory is given back, 0.1 to 6 ms of work: updates and large requests leave more than others need.

    By itself, Python collects when objects have become more by so many. While as many go as come, as in a full tree of prefixes, it does not, and
    then goes through all that came: tens of milliseconds.
    """
    gc.disable()
    seconds, due_s = itertools.count(1), clock() + 1.0

    def collect() -> None:
        nonlocal due_s
        if clock() >= due_s:
            due_s = clock() + 1.0
            number = next(seconds)
            gc.collect(1 if number % all_every else 2)
            if number % trim_every == 0:
                give_back_free_memory()

    return collect


async def keep_collecting() -> None:
    """`in_small_parts`, while an event loop runs; all, and free memory, once a minute. By itself, Python goes through all objects of waiting
    requests again and again, a tenth of a second where they are many, in which everybody waits."""
    import asyncio  # most processes with this module have no event loop

    collect = in_small_parts(all_every=60, trim_every=60)
    while True:
        await asyncio.sleep(1.0)
        collect()


def freeze() -> int:
    """Collect garbage once and exclude the remaining objects from later collections. Returns their number.

    The objects of a warm server (tokenizer, modules, tables) stay alive, and checking them again and again only costs pauses.
    At exit they are included again, so that extension modules see their objects deleted.
    """
    gc.collect()
    gc.freeze()
    atexit.unregister(gc.unfreeze)
    atexit.register(gc.unfreeze)
    return gc.get_freeze_count()


def collect_all() -> None:
    """Collect what was made at any time, and give its memory back."""
    gc.collect()
    give_back_free_memory()


def give_back_free_memory() -> None:
    """Return freed memory that malloc keeps, such as temporaries of loading, to the system. Does nothing if libc does not support it."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
