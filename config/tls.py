"""The server's certificate and key: from two files to the TLS context of its connections."""

import ssl

from penstock.config.options import ConfigError, FrontendOptions


def load_tls(options: FrontendOptions) -> ssl.SSLContext | None:
    """For connections of TLS 1.2 or later; None if the options name no certificate.

    Raises:
        ConfigError: in one sentence, if the files cannot be used.
    """
    if not options.tls_certificate and not options.tls_key:
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    load_certificate(context, options)
    return context


def load_certificate(context: ssl.SSLContext, options: FrontendOptions) -> None:
    """Read certificate and key into the context; new connections use them.

    Raises:
        ConfigError: as above.
    """
    files = {"--tls-certificate": options.tls_certificate, "--tls-key": options.tls_key}
    for flag, path in files.items():
        if not path:
            raise ConfigError(f"{flag} is missing: give both certificate and key, or neither")
        try:
            open(path, "rb").close()
        except OSError as error:
            raise ConfigError(f"{flag} {path!r} cannot be read: {error.strerror}") from None

    def refuse_password() -> str:  # otherwise OpenSSL would ask for it on the terminal
        raise ConfigError(f"--tls-key {options.tls_key!r} is encrypted: give one without a password")

    try:
        context.load_cert_chain(options.tls_certificate, options.tls_key, refuse_password)
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            problem = "do not belong together"
        else:
            problem = f"must hold a PEM certificate and its key: {error.reason or error}"
        raise ConfigError(
            f"--tls-certificate {options.tls_certificate!r} and --tls-key {options.tls_key!r} {problem}"
        ) from None
