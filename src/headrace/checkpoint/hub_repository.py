"""What a repository on the Hugging Face Hub holds, and which of its files serving needs. Uses the network.

Owns the requests to the Hub, their errors in plain words, and the choice of files; hub_download.py brings the files. The
token goes to the Hub alone: a redirect to another host (where large files are) does not carry it on.

API: https://huggingface.co/docs/hub/api; errors are told by the header X-Error-Code.
"""

import os
import re
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any
from urllib.parse import quote

import msgspec
import requests

from headrace.checkpoint.hub_cache import COMMIT, HubName, choose_gguf, is_gguf_model
from headrace.checkpoint.huggingface import INDEX_NAME
from headrace.errors import ModelError
from headrace.plain_types import plain_reason
from headrace.version import VERSION

TIMEOUT_S = (10.0, 60.0)  # to connect, between two pieces of data
RETRIED = frozenset({408, 429, 500, 502, 503, 504})
WAIT_S = 1.0  # before the second attempt; doubles
_OFFLINE = ("1", "ON", "YES", "TRUE")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_SHA1 = re.compile(r"[0-9a-f]{40}")
# Beside the weights: configuration, tokenizers, templates, and the modules of sentence-transformers (1_Pooling, 2_Dense). Never code, never pickles.
_COMPANIONS = re.compile(
    r"[^/]+\.(json|jinja)|tokenizer\.model|merges\.txt|vocab\.txt|additional_chat_templates/[^/]+\.jinja"
    r"|[0-9]+_[A-Za-z]+/(config\.json|model\.safetensors)"
)
_OTHER_WEIGHTS = re.compile(r"(pytorch_model|flax_model|tf_model|consolidated)[.-]")
_PICKLED = (".bin", ".pt", ".pth", ".ckpt", ".pkl")


class _Lfs(msgspec.Struct):
    sha256: str
    size: int


class _Sibling(msgspec.Struct):
    rfilename: str
    size: int | None = None
    blobId: str | None = None
    lfs: _Lfs | None = None


class _Info(msgspec.Struct):
    sha: str
    siblings: list[_Sibling] = []


@dataclass(frozen=True, slots=True)
class HubFile:
    """A file of a repository. digest: sha256 of its bytes for large files, else git's sha1; it is its name in the cache."""

    name: str
    num_bytes: int
    digest: str


class Hub:
    """One Hub ($HF_ENDPOINT, else huggingface.co), with the user's token ($HF_TOKEN, or of `hf auth login`)."""

    def __init__(self) -> None:
        """Raises ModelError if the environment forbids the network."""
        for variable in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
            if os.environ.get(variable, "").upper() in _OFFLINE:
                raise ModelError(f"{variable} is set, so nothing is downloaded; unset it for `headrace pull`")
        from huggingface_hub import get_token

        self.endpoint = (os.environ.get("HF_ENDPOINT") or "https://huggingface.co").rstrip("/")
        if not self.endpoint.startswith(("http://", "https://")):
            raise ModelError(f"HF_ENDPOINT is {self.endpoint!r}; expected an http or https URL")
        self._session = requests.Session()
        self._token = get_token()
        self._session.auth = _Token(self._token)
        self._session.headers.update({"User-Agent": f"headrace/{VERSION}", "Accept-Encoding": "identity"})

    def get(self, path: str, headers: dict[str, str] | None = None) -> requests.Response:
        """Start a GET; the body is read by the caller, who closes the response. Raises requests.RequestException."""
        return self._session.get(f"{self.endpoint}/{path}", headers=headers, stream=True, timeout=TIMEOUT_S)

    def file_path(self, repo: str, commit: str, file: str) -> str:
        """For `get`."""
        return f"{repo}/resolve/{commit}/{quote(file)}"

    def files(self, name: HubName) -> tuple[str, list[HubFile]]:
        """The commit that a revision is now, and its files. Raises ModelError."""
        path = f"api/models/{name.repo}/revision/{quote(name.revision, safe='')}?blobs=true"
        for wait_s in (WAIT_S, 2 * WAIT_S, None):
            try:
                with self.get(path) as response:
                    body, status = response.content, response.status_code
            except requests.RequestException as error:
                raise self._unreachable(error) from error
            if status not in RETRIED or wait_s is None:
                break
            time.sleep(wait_s)
        if not response.ok:
            raise self.refusal(response, name)
        try:
            info = msgspec.json.decode(body, type=_Info)
        except msgspec.DecodeError as error:
            raise ModelError(f"{self.endpoint} did not answer as the Hub does: {plain_reason(error)}") from error
        files = [_file(sibling) for sibling in info.siblings]
        if not COMMIT.fullmatch(info.sha):
            raise ModelError(f"{self.endpoint} gave no commit of {name.repo}")
        return info.sha, [file for file in files if file is not None]

    def refusal(self, response: requests.Response, name: HubName) -> ModelError:
        """What an answer of the Hub other than success means."""
        code, status = response.headers.get("X-Error-Code", ""), response.status_code
        if code == "GatedRepo":
            return ModelError(
                f"{name.repo} is gated: accept its terms at {self.endpoint}/{name.repo}, and set HF_TOKEN to a token "
                "of the account that did"
            )
        if code == "RevisionNotFound":
            return ModelError(f"{name.repo} has no revision {name.revision} at {self.endpoint}")
        if code == "EntryNotFound":
            return ModelError(f"{self.endpoint} does not have all files of {name.repo} that it lists; try again later")
        if status == 401 and self._token is None:
            return ModelError(
                f"there is no model {name.repo} at {self.endpoint}, or it is private; for a private one set HF_TOKEN"
            )
        if status in (401, 403):
            return ModelError(f"{self.endpoint} refuses {name.repo} with this token (status {status}); check HF_TOKEN")
        if status == 404:
            return ModelError(f"there is no model {name.repo} at {self.endpoint}, or this token may not see it")
        return ModelError(f"{self.endpoint} answered with status {status} for {name.repo}; try again later")

    def _unreachable(self, error: requests.RequestException) -> ModelError:
        why = "it did not answer in time" if isinstance(error, requests.Timeout) else type(error).__name__
        return ModelError(
            f"{self.endpoint} cannot be reached ({why}); check the network, or set HF_ENDPOINT to a mirror"
        )


class _Token(requests.auth.AuthBase):
    """Also keeps requests from taking a password of ~/.netrc."""

    def __init__(self, token: str | None) -> None:
        self._token = token

    def __call__(self, request: requests.PreparedRequest) -> requests.PreparedRequest:
        if self._token is not None:
            request.headers["Authorization"] = f"Bearer {self._token}"
        return request


def needed_files(files: list[HubFile], name: HubName, indexed: Iterable[str] | None) -> list[HubFile]:
    """The files that serving the model takes: safetensors with their companions, or one GGUF file.

    indexed: the shards that the repository's index names, None without an index. Raises ModelError if the repository has
    no such weights, or several GGUF files of which none was chosen.
    """
    by_name = {file.name: file for file in files}
    safetensors = [file for file in by_name if file.endswith(".safetensors") and "/" not in file]
    if name.file is None and safetensors:
        if indexed is not None:
            weights = list(dict.fromkeys(indexed))
        elif "model.safetensors" in by_name:
            weights = ["model.safetensors"]
        else:
            weights = [file for file in safetensors if not _OTHER_WEIGHTS.match(file)]
        missing = [file for file in weights if file not in safetensors]
        if missing:
            raise ModelError(f"{INDEX_NAME} of {name.repo} names {missing[0]}, which is not a safetensors file of it")
        companions = [file for file in by_name if _COMPANIONS.fullmatch(file) and not _OTHER_WEIGHTS.match(file)]
        return [by_name[file] for file in (*companions, *weights)]
    if name.file is None and not any(map(is_gguf_model, by_name)):
        pickled = any(file.endswith(_PICKLED) for file in by_name)
        hint = "; its pickled weights are never downloaded, convert them to safetensors" if pickled else ""
        raise ModelError(f"{name.repo} has neither safetensors nor GGUF files{hint}")
    return [by_name[choose_gguf(by_name, name.file, name.repo)]]


def _file(sibling: _Sibling) -> HubFile | None:
    """None for a name or a digest that is no such thing: it becomes a path here."""
    path = PurePosixPath(sibling.rfilename)
    sound = not path.is_absolute() and ".." not in path.parts and path.as_posix() == sibling.rfilename
    if not sound or "\0" in sibling.rfilename or "\\" in sibling.rfilename:
        return None
    if sibling.lfs is not None:
        return HubFile(sibling.rfilename, sibling.lfs.size, sibling.lfs.sha256) if _good(sibling.lfs) else None
    if sibling.size is None or sibling.size < 0 or sibling.blobId is None or not _SHA1.fullmatch(sibling.blobId):
        return None
    return HubFile(sibling.rfilename, sibling.size, sibling.blobId)


def _good(lfs: _Lfs) -> bool:
    return lfs.size >= 0 and _SHA256.fullmatch(lfs.sha256) is not None


def weight_map(index: Any) -> list[str] | None:
    """The shards of a decoded index; None if it is none."""
    match index:
        case {"weight_map": dict(shards)} if all(isinstance(shard, str) for shard in shards.values()):
            return list(dict.fromkeys(shards.values()))
        case _:
            return None
