"""Where a frontend may listen: what must hold before the first process starts."""

import ipaddress
import os
from collections.abc import Mapping

from penstock.core.config.api_keys import KEY_VARIABLE, load_api_keys
from penstock.core.config.options import ConfigError, FrontendOptions
from penstock.core.config.tls import load_tls


def check_listening(options: FrontendOptions, environment: Mapping[str, str] = os.environ) -> None:
    """Refuse to let everybody in by oversight, and files that cannot be used.

    Raises:
        ConfigError: in one sentence: others could ask without a key, or the file of keys, the certificate or its
            key is wrong.
    """
    load_tls(options)
    keys = load_api_keys(options.api_keys_file, environment)
    if not keys and not options.insecure_bind and not is_loopback(options.host):
        raise ConfigError(
            f"--host {options.host} lets others in, and there is no API key: give --api-keys-file or the variable "
            f"{KEY_VARIABLE}, or --insecure-bind if everybody who reaches the port may ask everything"
        )


def is_loopback(host: str) -> bool:
    """Only this machine reaches the address. Names but localhost may mean any address, and count as such."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
