"""What a file is that was sent in place of an image or a sound, as far as its first bytes say it, in words for clients.

Owns the words only: what is read, and what is not, is decided where it is read (`images`, `sounds`). No imports of this project.
"""

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


def file_name(data: bytes, otherwise: str) -> str:
    """What the file is, with its article. otherwise: what is said of a file that is not known."""
    for start, name in _STARTS:
        if data.startswith(start):
            return name
    if data.startswith((b"RIFF", b"FORM")):
        return _FORMS.get(data[:4] + data[8:12], f"a {data[:4].decode()} file of a kind that is not known")
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
