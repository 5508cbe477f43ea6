"""Where a frontend may listen: checked before the first process starts."""

import ipaddress
import os
import socket
from collections.abc import Mapping

from penstock.config.api_keys import KEY_VARIABLE, load_api_keys
from penstock.config.options import ConfigError, FrontendOptions
from penstock.config.tls import load_tls


def check_listening(options: FrontendOptions, environment: Mapping[str, str] = os.environ) -> None:
    """Refuse to open the server to everyone by mistake, and files that cannot be used.

    Raises:
        ConfigError: in one sentence: others could use the server without a key, or the key file, the certificate or
            its private key cannot be used.
    """
    load_tls(options)
    keys = load_api_keys(options.api_keys_file, environment)
    if keys or options.insecure_bind:
        return
    given = f"--host {options.host}", f"--admin-port {options.admin_port}"
    for option, (host, _) in zip(given, addresses(options), strict=False):
        if not is_loopback(host):
            raise ConfigError(
                f"{option} is open to others, and there is no API key: give --api-keys-file or the variable "
                f"{KEY_VARIABLE}, or --insecure-bind if anyone who reaches the port may use the server"
            )


def has_files(options: FrontendOptions) -> bool:
    """Whether there are files that SIGHUP makes the frontends read, or open, again."""
    return bool(options.api_keys_file or options.tls_certificate or options.access_log)


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach the address. Names other than localhost may resolve to any address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def addresses(options: FrontendOptions) -> list[tuple[str, int]]:
    """Host and port of each listener: the public one, and the one for administrators if there is one."""
    admin = options.admin_address
    return [(options.host, options.port), *([] if admin is None else [admin])]


def bind(host: str, port: int, *, is_shared: bool) -> socket.socket:
    """Bind a socket that does not listen yet. If it is shared, other processes may bind the same port.

    Raises:
        OSError: if the port is taken, or the address is not one of this machine's.
    """
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if is_shared:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        listener.bind((host, port))
    except OSError:
        listener.close()
        raise
    return listener
