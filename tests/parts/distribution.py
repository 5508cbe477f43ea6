"""The toy as an installed distribution: what tells Python of its entry point, in a folder for `sys.path`."""

from pathlib import Path

from penstock.config.parts import GROUP


def install(folder: Path, package: str = "tests.parts.toy") -> Path:
    """Write what `pip install` would, for a part in this package; return the folder that belongs on `sys.path`."""
    name = package.rpartition(".")[2]
    info = folder / f"penstock_{name}-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: penstock-{name}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[{GROUP}]\n{name} = {package}\n")
    return folder
