"""What torch and the kernels find on this machine."""

import warnings
from importlib import metadata
from pathlib import Path

import torch

from penstock.config.cache_folder import cache_folder
from penstock.gpu_worker.devices.cpu import multiplies_bf16_matrices, num_cores
from penstock.kernels.native.build import built_library, find_compiler
from penstock.lab.planning.requests import Installation

_DRIVER = Path("/proc/driver/nvidia/version")


def inspect() -> Installation:
    """Look at the installation; nothing is measured or compiled."""
    library = built_library()
    gpus: list[tuple[str, int]] = []
    cuda_error = ""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        if torch.cuda.is_available():
            for index in range(torch.cuda.device_count()):
                properties = torch.cuda.get_device_properties(index)
                gpus.append((properties.name, int(properties.total_memory)))
        elif told:
            cuda_error = str(told[-1].message).splitlines()[0]
    try:
        triton = metadata.version("triton")
    except metadata.PackageNotFoundError:
        triton = ""
    is_portable = library is not None and library.parent != cache_folder()
    return Installation(
        torch=str(torch.__version__),
        triton=triton,
        cuda=torch.version.cuda or "",
        cuda_error=cuda_error,
        driver=_driver_version(),
        gpus=gpus,
        num_threads=num_cores(),
        compiler=find_compiler() or "",
        library="" if library is None else str(library),
        family=library.name.removeprefix("kernels-").rpartition("-")[0] if library and is_portable else "",
        multiplies_tiles=multiplies_bf16_matrices(),
    )


def _driver_version() -> str:
    try:
        words = _DRIVER.read_text().splitlines()[0].split()
    except (OSError, IndexError):
        return ""
    return next((word for word in words if word[:1].isdigit()), "unknown")
