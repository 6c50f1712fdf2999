"""The form of errors on each path, written down apart from the code that makes them."""

from typing import Any


def checked_error(path: str, body: Any) -> dict[str, Any]:
    """What `body`, the whole body of a failing reply, says: `message`, and in OpenAI's form `type`, `param` and `code`. Fails for another form."""
    if path.startswith("/api/"):
        assert list(body) == ["error"], path
        assert type(body["error"]) is str, path
        return {"message": body["error"]}
    if path.startswith(("/v1/messages", "/messages")):
        assert body["type"] == "error", path
        assert set(body["error"]) == {"type", "message"}, path
        return dict(body["error"])
    error: dict[str, Any] = body["error"]
    assert set(error) == {"message", "type", "param", "code"}, path
    return error
