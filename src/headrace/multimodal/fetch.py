"""Fetches images over HTTP, of the hosts that the operator allows and of no other address."""

from headrace.config.media_args import MediaArgs
from headrace.multimodal.images import ImageRefusedError


class Fetcher:
    """See the module docstring."""

    def __init__(self, args: MediaArgs) -> None:
        self._args = args

    async def fetch(self, url: str) -> bytes:
        """The bytes of an image. Raises ImageRefusedError."""
        raise ImageRefusedError("this server fetches no images (--allowed-media-domains)", "url")
