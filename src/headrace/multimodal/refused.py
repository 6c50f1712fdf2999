"""Why an image is not taken. Owns the one exception of this room; `loader` tells the client which image it is."""


class MediaRefusedError(Exception):
    """The image is not taken. message: why, as the end of "image_data[0]: ". kind: a word for metrics."""

    def __init__(self, message: str, kind: str) -> None:
        super().__init__(message)
        self.message = message
        self.kind = kind
