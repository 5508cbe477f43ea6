"""Numbers of bytes for people: every command shows them in the same units, those of the options."""


def size(num_bytes: float) -> str:
    """Format a number of bytes: `1.4 GiB`."""
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if num_bytes >= unit:
            return f"{num_bytes / unit:.1f} {name}"
    return f"{num_bytes:.0f} B"
