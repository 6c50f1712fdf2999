"""The certificate of --ssl-certfile and --ssl-keyfile: checked before anything is loaded, so that a wrong one is found at once.

Does not own connections: uvicorn makes them with these files.
"""

import ssl

from headrace.config.server_args import ServerArgs
from headrace.errors import ConfigError


def uses_tls(args: ServerArgs) -> bool:
    """Whether the server speaks HTTPS."""
    return args.ssl_certfile is not None


def check_certificate(args: ServerArgs) -> None:
    """Raises ConfigError, naming the option, for files that cannot be read or do not belong together."""
    if args.ssl_certfile is None:
        if args.ssl_keyfile is not None:
            raise ConfigError("--ssl-keyfile needs --ssl-certfile")
        return
    _check_readable("--ssl-certfile", args.ssl_certfile)
    key_option = "--ssl-certfile" if args.ssl_keyfile is None else "--ssl-keyfile"
    if args.ssl_keyfile is not None:
        _check_readable(key_option, args.ssl_keyfile)

    def no_password() -> str:
        raise ConfigError(
            f"{key_option}: the key is encrypted, and the server cannot ask for its password; decrypt the file"
        )

    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(args.ssl_certfile, args.ssl_keyfile, no_password)
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            raise ConfigError("--ssl-keyfile: this is not the key of the certificate in --ssl-certfile") from None
        files = "--ssl-certfile" if args.ssl_keyfile is None else "--ssl-certfile and --ssl-keyfile"
        raise ConfigError(
            f"{files}: not a certificate in PEM and its private key ({error.reason or 'unreadable'})"
        ) from None


def _check_readable(option: str, path: str) -> None:
    try:
        with open(path, "rb"):
            pass
    except OSError as error:
        raise ConfigError(f"{option} {path}: cannot be read ({error.strerror})") from None
