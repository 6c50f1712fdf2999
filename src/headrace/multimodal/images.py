"""From the bytes of an image file to its pixels in RGB. Runs in a child process, since a file may be hostile; it sets Pillow's own limits.

- The content decides what a file is, never its name or its declared type: PNG, JPEG, WEBP, GIF or BMP, of one frame. What follows is ignored.
- An image is turned as its EXIF or XMP orientation says, as transformers' `load_image` does.
- Grey, palette, CMYK and YCbCr become RGB as Pillow converts them, and what is transparent is laid on white, as transformers' processors do. Of
  16 bits the upper 8 are taken, of grey as of colours, where Pillow would cut grey off at 255.
"""

import io
import warnings

import numpy as np
from PIL import BmpImagePlugin as _bmp  # noqa: F401  (registers its format, as the others do)
from PIL import GifImagePlugin as _gif  # noqa: F401
from PIL import Image, ImageFile, UnidentifiedImageError
from PIL import JpegImagePlugin as _jpeg  # noqa: F401
from PIL import PngImagePlugin as _png  # noqa: F401
from PIL import WebPImagePlugin as _webp  # noqa: F401

from headrace.multimodal.limits import MAX_PIXELS, MAX_SIDE, MediaRefusedError, file_name

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
SERVED = "PNG, JPEG, WEBP, GIF and BMP"

_ORIENTATION = 0x0112
_TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
"""How to turn an image by the number of its EXIF orientation."""

_CONVERTED = frozenset({"1", "L", "LA", "La", "P", "PA", "RGB", "RGBA", "RGBa", "RGBX", "CMYK", "YCbCr"})
_GREY_16 = {"I;16": "<u2", "I;16L": "<u2", "I;16B": ">u2", "I;16N": "=u2"}

_SERVED_STARTS = (b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff", b"GIF8", b"BM")

Image.MAX_IMAGE_PIXELS = None  # the size is checked here, before anything is decoded
ImageFile.LOAD_TRUNCATED_IMAGES = False


def read_image(data: bytes) -> Image.Image:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return _rgb(_turned(_opened(data)))
        except MemoryError:
            raise MediaRefusedError("decoding the image takes too much memory", "memory") from None


def _opened(data: bytes) -> Image.Image:
    if not data:
        raise MediaRefusedError("the file is empty", "format")
    try:
        image = Image.open(io.BytesIO(data), formats=FORMATS)
    except MemoryError:
        raise
    except UnidentifiedImageError:
        if data.startswith(_SERVED_STARTS) or data[:4] + data[8:12] == b"RIFFWEBP":
            raise MediaRefusedError("the image is broken: its header cannot be read", "broken") from None
        raise MediaRefusedError(
            f"it is {file_name(data, 'not a known image format')}; supported formats are {SERVED}", "format"
        ) from None
    except Exception:
        raise MediaRefusedError("the image is broken: its header cannot be read", "broken") from None
    width, height = image.size
    if width < 1 or height < 1:
        raise MediaRefusedError(f"the image has {width} x {height} pixels", "broken")
    if width * height > MAX_PIXELS or max(width, height) > MAX_SIDE:
        raise MediaRefusedError(
            f"the image has {width} x {height} pixels; at most {MAX_PIXELS} are decoded, and {MAX_SIDE} of a side",
            "pixels",
        )
    try:
        if image.format != "MPO" and getattr(image, "is_animated", False):
            raise MediaRefusedError("the image has several frames: send one of them", "frames")
        image.load()
    except (MemoryError, MediaRefusedError):
        raise
    except Exception:
        raise MediaRefusedError("the image is broken or incomplete: it cannot be decoded", "broken") from None
    return image


def _turned(image: Image.Image) -> Image.Image:
    """The image as its orientation says. An orientation that cannot be read turns nothing."""
    try:
        orientation = image.getexif().get(_ORIENTATION)
    except MemoryError:
        raise
    except Exception:
        return image
    turn = _TURNS.get(orientation) if isinstance(orientation, int) else None
    return image if turn is None else image.transpose(turn)


def _rgb(image: Image.Image) -> Image.Image:
    if image.mode in _GREY_16:
        grey = np.asarray(image).astype(np.uint16) >> 8
        image = Image.fromarray(grey.astype(np.uint8))
    elif image.mode not in _CONVERTED:
        raise MediaRefusedError(f"pixel mode {image.mode} is not supported; convert the image to RGB", "format")
    try:
        if "A" in image.getbands() or image.info.get("transparency") is not None:
            image = image.convert("RGBA")
            white = Image.new("RGBA", image.size, (255, 255, 255, 255))
            image = Image.alpha_composite(white, image)
        return image.convert("RGB")
    except MemoryError:
        raise
    except Exception:
        raise MediaRefusedError("the image is broken: its colours cannot be read", "broken") from None
