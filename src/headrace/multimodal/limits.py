"""What one item of media may cost, and how one is refused: the limits, the error, and the names of file formats that are not supported."""

MIB = 1 << 20

MAX_PIXELS = 50_000_000  # of an image, and of what it is resized to
MAX_VIDEO_PIXELS = 250_000_000  # of all frames of a video as they are given: as many as 120 of 1920 x 1080
MAX_SIDE = 1 << 16  # of an image, in pixels
MAX_CHANNELS = 8  # of an audio file
MIN_RATE = 4_000
MAX_RATE = 384_000
"""Samples in a second of an audio file."""

MAX_LEVEL = 1e12
"""Of a sample, where 1 is full scale. The power of a frame of such samples is about 1e29, which float32 holds: features stay finite."""

SLACK_S = 0.25
"""By which audio may be longer than the model takes, and is cut: encoders of MP3 add some silence to what they are given."""

MIN_HOPS = 4  # of audio, from one frame of its features to the next: fewer may give no token
MAX_WAV_CHUNKS = 1000  # before the samples in a WAV file
MAX_ITEM_BYTES = 128 * MIB  # of the values of one item
PREPARE_LIMIT_S = 10.0  # processor time to decode and prepare one item
CHILD_MEMORY_BYTES = 1536 * MIB  # what a child may allocate beyond what it has when it starts
FETCH_LIMIT_S = 10.0  # from the name of a host to the last byte of a file, redirects included
VIDEO_LIMIT_S = 30.0  # until all frames of a video are there
MAX_VIDEO_BYTES = 64 * MIB  # of the files of the frames of one video


class MediaRefusedError(Exception):
    """The item is refused. message: why, as the end of "image_data[0]: ". kind: a word for metrics."""

    def __init__(self, message: str, kind: str) -> None:
        super().__init__(message)
        self.message = message
        self.kind = kind


_STARTS = (
    (b"%PDF-", "a PDF"),
    (b"\x89PNG\r\n\x1a\n", "a PNG image"),
    (b"\xff\xd8\xff", "a JPEG image"),
    (b"GIF8", "a GIF image"),
    (b"II*\0", "a TIFF image"),
    (b"MM\0*", "a TIFF image"),
    (b"8BPS", "a Photoshop file"),
    (b"\0\0\x01\0", "an icon (ICO)"),
    (b"\x00\x00\x00\x0cjP  ", "a JPEG 2000 image"),
    (b"\xff\x0a", "a JPEG XL image"),
    (b"\x00\x00\x00\x0cJXL ", "a JPEG XL image"),
    (b"PK\x03\x04", "a ZIP archive"),
    (b"\x1f\x8b", "a gzip archive"),
    (b"\x1aE\xdf\xa3", "a WebM or Matroska file"),
    (b"OggS", "an Ogg file"),
    (b"ID3", "an MP3 file"),
    (b"fLaC", "a FLAC file"),
    (b"RF64", "an RF64 file"),
    (b"RIFX", "a RIFX file"),
    (b"riff\x2e\x91\xcf\x11", "a Wave64 file"),
    (b".snd", "an AU file"),
    (b"caff", "a Core Audio file (CAF)"),
    (b"#!AMR", "an AMR file"),
    (b"wvpk", "a WavPack file"),
    (b"MAC ", "a Monkey's Audio file"),
    (b"MThd", "a MIDI file"),
    (b"\x30\x26\xb2\x75\x8e\x66\xcf\x11", "a Windows Media file (ASF)"),
    (b"FLV\x01", "a Flash video"),
    (b"{", "JSON"),
)
_BRANDS = {
    b"heic": "a HEIC image", b"heix": "a HEIC image", b"mif1": "a HEIF image", b"avif": "an AVIF image", b"avis": "an AVIF image",
    b"M4A ": "an M4A file (AAC in MP4)", b"M4B ": "an M4A file (AAC in MP4)",
}  # fmt: skip
_FORMS = {
    b"RIFFWAVE": "a WAV file (RIFF)",
    b"RIFFWEBP": "a WEBP image",
    b"RIFFAVI ": "an AVI video (RIFF)",
    b"FORMAIFF": "an AIFF file",
    b"FORMAIFC": "an AIFF file",
}


def png_pixels(data: bytes) -> int:
    """As many as a PNG image says that it has; 0 for other files."""
    return int.from_bytes(data[16:20]) * int.from_bytes(data[20:24]) if data.startswith(_STARTS[1][0]) else 0


def file_name(data: bytes, otherwise: str) -> str:
    """The format of a file, with an article. otherwise: of an unknown one."""
    for start, name in _STARTS:
        if data.startswith(start):
            return name
    if data.startswith((b"RIFF", b"FORM")):
        return _FORMS.get(data[:4] + data[8:12], f"a {data[:4].decode()} file of an unknown kind")
    if data[4:8] == b"ftyp":
        return _BRANDS.get(data[8:12], "an MP4 or QuickTime file")
    if len(data) > 2 and data[0] == 0xFF and data[1] & 0xF6 == 0xF0:
        return "an AAC file (ADTS)"
    text = data[:1024].lstrip(b"\xef\xbb\xbf \t\r\n").lower()
    if text.startswith((b"<svg", b"<?xml")):
        return "SVG or other XML"
    if text.startswith((b"<!doctype", b"<html")):
        return "a web page (HTML)"
    return otherwise
