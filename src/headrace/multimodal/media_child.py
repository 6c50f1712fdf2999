"""A child that decodes and prepares images: `python -m headrace.multimodal.media_child`. What costs too much costs it its life, not the server's.

Owns the child's work; `media_pool` is the other side. The child is sent a `Setup`, answers `Ready`, and from then on prints nothing and answers each
`ImageJob` with a `Verdict` (`media_messages`).
"""

import hashlib

import msgspec

from headrace.checkpoint.image_processors import ImageSettings
from headrace.child_pool.child_side import MIB, Ready, limit_memory, resident_bytes, run, say_no_more
from headrace.child_pool.frames import Frames
from headrace.garbage import give_back_free_memory
from headrace.messages.media import KEY_BYTES
from headrace.multimodal.images import read_image
from headrace.multimodal.media_messages import Done, ImageJob, Refused, Setup, Verdict
from headrace.multimodal.processors import prepare
from headrace.multimodal.refused import MediaRefusedError

STACK_BYTES = 8 * MIB

NICE = 5
"""A request waits for its images, and others for the steps of the model."""

_SETUPS = msgspec.msgpack.Decoder(Setup)
_JOBS = msgspec.msgpack.Decoder(ImageJob)


def prepare_job(job: ImageJob, settings: ImageSettings, settings_key: bytes) -> Verdict:
    """Decode and prepare an image. settings_key: stands for the settings in the key of the item."""
    try:
        done = prepare(read_image(job.data), settings, job.low)
    except MediaRefusedError as error:
        return Refused(error.message, error.kind)
    except MemoryError:
        return Refused("decoding the image takes too much memory", "memory")
    values = done.values.astype("<f4", copy=False).tobytes()
    key = hashlib.blake2b(done.digest + repr(done.grid).encode(), key=settings_key, digest_size=KEY_BYTES)
    return Done(key.digest(), values, done.values.shape, done.grid)


def settings_key(settings: ImageSettings) -> bytes:
    """Stands for settings in keys: equal for equal settings."""
    return hashlib.blake2b(msgspec.msgpack.encode(settings), digest_size=KEY_BYTES).digest()


def serve(frames: Frames) -> None:
    """Prepare what the parent sends, until it closes the socket."""
    setup = frames.receive(_SETUPS)
    key = settings_key(setup.settings)
    own_bytes = resident_bytes()
    limit_memory(setup.memory_bytes)
    frames.send(Ready())
    say_no_more()
    while True:
        verdict = prepare_job(frames.receive(_JOBS), setup.settings, key)
        give_back_free_memory()
        frames.send(
            msgspec.structs.replace(verdict, left_bytes=max(resident_bytes() - own_bytes - _num_bytes(verdict), 0))
        )
        del verdict


def _num_bytes(verdict: Verdict) -> int:
    return len(verdict.values) if isinstance(verdict, Done) else 0


def main() -> None:
    """Entry of the child."""
    run(serve, STACK_BYTES, "images", NICE)


if __name__ == "__main__":
    main()
