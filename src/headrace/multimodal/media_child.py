"""A child that decodes and prepares media: `python -m headrace.multimodal.media_child`. What costs too much costs it its life, not the server's.

The child is sent a `Setup`, answers `Ready`, and from then on prints nothing and answers each job with a `Verdict` (`media_messages`).
"""

import hashlib
from collections.abc import Iterator

import msgspec
from PIL.Image import Image

from headrace.checkpoint.preprocessor_config import AudioSettings
from headrace.child_pool.child_side import MIB, Frames, answer_all, run
from headrace.messages.media import KEY_BYTES
from headrace.multimodal.images import read_image
from headrace.multimodal.limits import MAX_VIDEO_PIXELS, MediaRefusedError
from headrace.multimodal.media_messages import (
    AudioJob,
    Done,
    ImageJob,
    MediaJob,
    MediaSettings,
    Refused,
    Setup,
    Verdict,
    VideoJob,
)
from headrace.multimodal.processors import Prepared, prepare, prepare_video

STACK_BYTES = 8 * MIB

NICE = 5  # A request waits for its media, and others for the steps of the model
_SETUPS = msgspec.msgpack.Decoder(Setup)
_JOBS: msgspec.msgpack.Decoder[MediaJob] = msgspec.msgpack.Decoder(MediaJob)


def prepare_job(job: MediaJob, settings: MediaSettings, settings_key: bytes) -> Verdict:
    """Decode and prepare an item. settings_key: stands for the settings in the key of the item."""
    try:
        done = _prepared(job, settings)
    except MediaRefusedError as error:
        return Refused(error.message, error.kind)
    except MemoryError:
        return Refused(f"decoding the {job.kind.one} takes too much memory", "memory")
    values = done.values.astype("<f4", copy=False).tobytes()
    about = repr((done.grid, done.step_s)).encode()
    key = hashlib.blake2b(done.digest + about, key=settings_key, digest_size=KEY_BYTES, person=job.kind.encode())
    return Done(key.digest(), values, done.values.shape, done.grid, done.step_s)


def settings_key(settings: MediaSettings) -> bytes:
    return hashlib.blake2b(msgspec.msgpack.encode(settings), digest_size=KEY_BYTES).digest()


def serve(frames: Frames) -> None:
    setup = frames.receive(_SETUPS)
    key = settings_key(setup.settings)
    answer_all(
        frames, _JOBS, lambda job: prepare_job(job, setup.settings, key), setup.memory_bytes, num_bytes=_num_bytes
    )


def main() -> None:
    run(serve, STACK_BYTES, "media", NICE)


def _prepared(job: MediaJob, settings: MediaSettings) -> Prepared:
    match job:
        case ImageJob():
            assert settings.images is not None, "the model takes images"
            return prepare(read_image(job.data), settings.images, job.low, job.squared)
        case AudioJob():
            assert settings.audio is not None, "the model takes audio"
            return _prepared_audio(job.data, settings.audio)
        case VideoJob():
            assert settings.videos is not None, "the model takes videos"
            return prepare_video(_frames(job), len(job.frames), job.fps, settings.videos, settings.video_patches)


def _frames(job: VideoJob) -> Iterator[Image]:
    """The frames, one by one. Raises MediaRefusedError, which tells which of them is wrong."""
    num_pixels = 0
    for number, data in enumerate(job.frames):
        try:
            frame = read_image(data)
        except MediaRefusedError as error:
            raise MediaRefusedError(f"frames[{number}]: {error.message}", error.kind) from None
        num_pixels += frame.width * frame.height
        if num_pixels > MAX_VIDEO_PIXELS:
            raise MediaRefusedError(
                f"its frames have more than {MAX_VIDEO_PIXELS} pixels together: send smaller ones", "pixels"
            )
        yield frame


def _prepared_audio(data: bytes, settings: AudioSettings) -> Prepared:
    from headrace.multimodal.audio import (
        log_mel,
        num_positions,
        read_audio_file,  # with the libraries that it needs, for the first audio file
    )

    samples = read_audio_file(data, settings)
    digest = hashlib.blake2b(samples.data).digest()
    return Prepared(log_mel(samples, settings), (num_positions(len(samples), settings), 1, 1), digest)


def _num_bytes(verdict: Verdict) -> int:
    return len(verdict.values) if isinstance(verdict, Done) else 0


if __name__ == "__main__":
    main()
