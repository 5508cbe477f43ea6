"""The description of this machine for plans. It is kept for a day, if little else ran while it was measured."""

import hashlib
import os
import platform
import time
from pathlib import Path

import msgspec
import structlog
import torch

from penstock.config.cache_folder import cache_folder
from penstock.gpu_worker.devices.cpu import num_cores
from penstock.gpu_worker.devices.open import choose_dtype
from penstock.ipc.version import VERSION
from penstock.kernels.native.build import built_library
from penstock.lab.calibration.probes import TINY, Probes
from penstock.lab.calibration.rates import device_rates, read_rate
from penstock.lab.planning.machines import Machine
from penstock.lab.planning.step_costs import Pace, StepCosts, describe

log = structlog.get_logger()

KEPT_SECONDS = 24 * 3600.0
"""After a longer time, a shared machine may have become faster or slower."""
_QUIET = 0.5
"""Load average for each core up to which a machine counts as idle except for the measurement."""
_FORMATS = {torch.bfloat16: "fp16", torch.float32: "fp32"}
_DTYPES = {torch.bfloat16: "bfloat16", torch.float32: "float32"}
_CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
_USUAL_CACHE = 32 << 20


class ThisCpu:
    """This machine's CPU. It holds the synthetic models with which it is measured."""

    def __init__(self, num_threads: int = 0) -> None:
        self.num_threads = num_threads or num_cores()
        self._dtype = choose_dtype("auto", "bfloat16", torch.device("cpu"))
        self._probes = Probes(_DTYPES[self._dtype], device="cpu", num_threads=num_threads)
        self._probes.load(TINY)
        self._runtime = float(resident_bytes())
        self._steps: StepCosts | None = None

    def pace(self) -> Pace:
        """How fast the CPU is now, compared to the last measurement; takes a tenth of a second."""
        if self._steps is None:
            self._steps = self._measure_steps()
        return self._probes.pace(self._steps)

    def measure(self) -> Machine:
        """Measure the CPU; takes a few seconds."""
        rate = read_rate(self.num_threads)
        self._steps = steps = self._measure_steps()
        flops = describe(steps)["flops_per_second"]
        # Without bf16 arithmetic, the native kernels widen stored bf16 weights as they read them.
        weights = "fp16" if built_library() else _FORMATS[self._dtype]
        return Machine(
            name=_processor(self.num_threads),
            memory=float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")),
            bandwidth=rate,
            link=rate,
            flops={"fp16": flops},
            runtime=self._runtime,
            most=1,
            weights=weights,
            kv=_FORMATS[self._dtype],
            steps=steps,
            measured_at=time.time(),
        )

    def _measure_steps(self) -> StepCosts:
        return self._probes.measure(_cache_bytes(), float(self._dtype.itemsize))


def this_cpu(num_threads: int = 0, *, again: bool = False) -> Machine:
    """This CPU as measured within the last day, or else now; the result is kept if little else runs here."""
    path = cache_folder() / f"machine-{_fingerprint(num_threads or num_cores())}.json"
    if not again:
        try:
            kept = msgspec.json.decode(path.read_bytes(), type=Machine)
        except (OSError, msgspec.MsgspecError):
            kept = None
        if kept is not None and 0 <= time.time() - kept.measured_at < KEPT_SECONDS:
            return kept
    others = os.getloadavg()[0]
    found = ThisCpu(num_threads).measure()
    if others > _QUIET * num_cores():
        log.warning("other processes use this machine, so its description is not kept", load_average=round(others, 2))
        return found
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_suffix(f".{os.getpid()}")
    aside.write_bytes(msgspec.json.encode(found))
    aside.replace(path)
    return found


def this_gpu(known: dict[str, Machine]) -> Machine:
    """The first GPU: its published figures if it is known, else measured ones."""
    properties = torch.cuda.get_device_properties(0)
    count = torch.cuda.device_count()
    machine = known_gpu(properties.name, known)
    if machine is None:
        bandwidth, flops = device_rates(torch.device("cuda", 0), torch.cuda.synchronize)
        machine = Machine(name=properties.name, memory=0.0, bandwidth=bandwidth, link=64e9, flops={"fp16": flops})
    return msgspec.structs.replace(machine, memory=float(properties.total_memory), most=count)


def known_gpu(name: str, known: dict[str, Machine]) -> Machine | None:
    """The machine for the driver's name of a GPU; None for PCIe cards, which are slower than their namesakes."""
    words = name.upper().replace("-", " ").split()
    if "PCIE" in words or "NVL" in words:
        return None
    for key, machine in known.items():
        wanted = key.upper().split("-")
        if any(words[i : i + len(wanted)] == wanted for i in range(len(words))):
            return machine
    return None


def resident_bytes() -> int:
    """Resident memory of this process, in bytes."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _cache_bytes() -> float:
    """Bytes of a core's last-level cache."""
    found = 0
    for path in _CACHES.glob("index*/size"):
        text = path.read_text().strip()
        units = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
        if text[:-1].isdigit() and text[-1] in units:
            found = max(found, int(text[:-1]) * units[text[-1]])
    return float(found or _USUAL_CACHE)


def _processor(num_threads: int) -> str:
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.is_file() else []
    named = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "")
    return f"{named or platform.processor()}, {num_threads} threads"


def _fingerprint(num_threads: int) -> str:
    """A fingerprint of all known facts on which the description depends."""
    about = (VERSION, str(built_library()), _processor(num_threads), platform.node(), torch.__version__)
    return hashlib.sha256(repr(about).encode()).hexdigest()[:16]
