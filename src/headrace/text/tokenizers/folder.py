"""A tokenizer from a Hugging Face folder."""

from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken

from headrace.checkpoint.files import read_json_object
from headrace.errors import ModelError
from headrace.text.tokenizers.base import Tokenizer, frame_texts

_FIM_TOKENS = ("prefix_token", "suffix_token", "middle_token")
_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


def tokenizer_from_folder(path: Path) -> Tokenizer:
    """From tokenizer.json and its companions. Raises ModelError when they are missing or broken."""
    try:
        return _read(path)
    except UnicodeEncodeError as err:  # JSON can spell it, and no text of a model holds it
        raise ModelError(
            f"{path.name}: a token or a template has half of a surrogate pair: {err.object!r:.80}"
        ) from None


def _read(path: Path) -> Tokenizer:
    config_file = path / "tokenizer_config.json"
    config = read_json_object(config_file) if config_file.is_file() else {}
    map_file = path / "special_tokens_map.json"
    named = read_json_object(map_file) if map_file.is_file() else {}
    named |= {key: value for key, value in config.items() if value is not None}
    backend = _read_backend(path)
    _mark_special(backend, config, named)
    texts = {key: text for key in (*_NAMED_TOKENS, *_FIM_TOKENS) if (text := _content(named.get(key))) is not None}
    ids = {key: backend.token_to_id(texts[key]) if key in texts else None for key in _NAMED_TOKENS}
    _ensure_bos_and_eos(backend, config, ids)
    eos = ids["eos_token"]
    return Tokenizer(
        backend,
        bos_id=ids["bos_token"],
        eos_ids=() if eos is None else (eos,),
        pad_id=ids["pad_token"],
        chat_template=_folder_template(path, config),
        named_tokens=texts,
        response_template=template if isinstance(template := config.get("response_template"), dict) else None,
    )


def _read_backend(path: Path) -> tokenizers.Tokenizer:
    file = path / "tokenizer.json"
    if file.is_file():
        try:
            return tokenizers.Tokenizer.from_file(str(file))
        except Exception as err:  # the library raises bare Exception for a malformed file
            raise ModelError(f"tokenizer.json cannot be read: {err}") from err
    if not (path / "tokenizer.model").is_file():
        raise ModelError(f"{path.name} contains neither tokenizer.json nor tokenizer.model")
    import transformers

    try:
        loaded = transformers.AutoTokenizer.from_pretrained(str(path), local_files_only=True)
    except (ValueError, OSError, ImportError, KeyError) as err:
        raise ModelError(f"tokenizer.model cannot be converted: {err}") from err
    backend = loaded.backend_tokenizer if loaded.is_fast else None
    if not isinstance(backend, tokenizers.Tokenizer):
        raise ModelError("tokenizer.model has no fast form; convert the folder to tokenizer.json with transformers")
    return backend


def _content(token: Any) -> str | None:
    """The text of a token as tokenizer_config.json spells it: a string, or an object with `content`."""
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else None


def _mark_special(backend: tokenizers.Tokenizer, config: dict[str, Any], named: dict[str, Any]) -> None:
    """Tokens that only tokenizer_config.json calls special, or adds: transformers honours both files."""
    known = {token.content: token for token in backend.get_added_tokens_decoder().values()}
    listed = config.get("added_tokens_decoder")
    entries = list(listed.items()) if isinstance(listed, dict) else []
    entries.sort(key=lambda item: int(item[0]) if item[0].isdecimal() else 1 << 40)
    new = [
        AddedToken(
            entry["content"],
            single_word=bool(entry.get("single_word")),
            lstrip=bool(entry.get("lstrip")),
            rstrip=bool(entry.get("rstrip")),
            normalized=bool(entry.get("normalized", not entry.get("special"))),
            special=bool(entry.get("special")),
        )
        for _, entry in entries
        if isinstance(entry, dict) and isinstance(entry.get("content"), str) and entry["content"] not in known
    ]
    backend.add_tokens(new)
    special: list[Any] = [named.get(key) for key in _NAMED_TOKENS]
    for key in ("additional_special_tokens", "extra_special_tokens"):
        extra = named.get(key) or []
        special += extra.values() if isinstance(extra, dict) else extra if isinstance(extra, list) else []
    unmarked = []
    for content in dict.fromkeys(text for text in map(_content, special) if text):
        if backend.token_to_id(content) is not None and not (content in known and known[content].special):
            unmarked.append(AddedToken(content, special=True, normalized=False))
    backend.add_special_tokens(unmarked)


def _ensure_bos_and_eos(backend: tokenizers.Tokenizer, config: dict[str, Any], ids: dict[str, int | None]) -> None:
    """`add_bos_token` and `add_eos_token`, where tokenizer.json does not already say so."""
    wanted_bos = config.get("add_bos_token") is True and ids["bos_token"] is not None
    wanted_eos = config.get("add_eos_token") is True and ids["eos_token"] is not None
    frame = backend.encode("", add_special_tokens=True).ids
    if (wanted_bos and ids["bos_token"] not in frame) or (wanted_eos and ids["eos_token"] not in frame):
        bos = ids["bos_token"] if wanted_bos or ids["bos_token"] in frame else None
        eos = ids["eos_token"] if wanted_eos or ids["eos_token"] in frame else None
        frame_texts(backend, bos, eos)


def _folder_template(path: Path, config: dict[str, Any]) -> dict[str, str]:
    """Chat templates by name: chat_template.jinja wins over tokenizer_config.json, as in transformers."""
    templates: dict[str, str] = {}
    stated = config.get("chat_template")
    if isinstance(stated, str):
        templates["default"] = stated
    elif isinstance(stated, list):
        for entry in stated:
            match entry:
                case {"name": str(name), "template": str(template)}:
                    templates[name] = template
                case _:
                    raise ModelError("tokenizer_config.json: chat_template has an entry without name and template")
    files = {"default": path / "chat_template.jinja"}
    files |= {file.stem: file for file in sorted((path / "additional_chat_templates").glob("*.jinja"))}
    for name, file in files.items():
        if file.is_file():
            try:
                templates[name] = file.read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError) as err:
                raise ModelError(f"{file.name} cannot be read: {err}") from err
    json_file = path / "chat_template.json"
    if not templates and json_file.is_file():
        stated = read_json_object(json_file).get("chat_template")
        if isinstance(stated, str):
            templates["default"] = stated
    for text in templates.values():
        text.encode()  # raises UnicodeEncodeError
    return templates
