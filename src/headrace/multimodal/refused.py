"""Why an item is not taken. Owns the one exception of this room; `loader` tells the client which item it is."""


class MediaRefusedError(Exception):
    """The item is not taken. message: why, as the end of "image_data[0]: ". kind: a word for metrics."""

    def __init__(self, message: str, kind: str) -> None:
        super().__init__(message)
        self.message = message
        self.kind = kind
