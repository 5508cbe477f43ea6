"""A study: simulates one load on one machine under any number of configurations."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from math import ceil, fsum
from pathlib import Path
from statistics import fmean, median
from typing import Any, NamedTuple

from msgspec.structs import replace

from penstock.config import Config, ConfigError
from penstock.config.step_limits import StepLimits
from penstock.ipc.messages import PROTOCOL_VERSION, AddRequest, WorkerHello
from penstock.lab.planning.plan import Plan
from penstock.lab.simulation.arrivals import Arrival, Targets
from penstock.lab.simulation.device import Device, Timing, frontend_waits
from penstock.lab.simulation.figures import figures
from penstock.lab.simulation.fit import EncodeCosts, MeasuredStep, fit_device, fit_encoding, fit_timing
from penstock.lab.simulation.outcomes import Run
from penstock.lab.simulation.prompts import Prompts
from penstock.lab.simulation.recordings import Delays, admission_of, arrivals_of, encoded_of, read_run, steps_of
from penstock.lab.simulation.roofline import RooflineDevice
from penstock.lab.simulation.simulator import Simulator, messages
from penstock.lab.simulation.step_traces import read_trace
from penstock.models.state_limits import num_empty_pages, num_snapshots
from penstock.parts.host.options import HostOptions
from penstock.parts.recording.options import RecordingOptions
from penstock.parts.recording.scheduler.step_trace import StepTrace

_TYPICAL = Timing(
    request=1.5e-3, request_per_token=1e-6, reply=0.5e-3, admission=250e-6, scheduler=100e-6, transport=300e-6
)
"""Delays of a server on one machine, if nothing was measured."""

_GIB = 1 << 30
_NUM_PARTS = 100  # candidates for the frontend's time, between 0 and the longest way from client to scheduler


class Tower(NamedTuple):
    """The vision tower, which makes embeddings of images."""

    costs: EncodeCosts
    embedding_bytes: int  # bytes of one embedding
    max_embedding_bytes: int  # most bytes of all kept embeddings
    images_are_whole: bool


class Machine(NamedTuple):
    """The device model, its memory, and the delays to its clients."""

    name: str
    device: Device
    timing: Timing
    num_slots: int  # tokens whose keys and values fit
    max_model_len: int
    vocab_size: int
    kv_bytes_per_token: float = 0.0  # 0: unknown
    copy_speed: float = 10e9  # bytes per second between device and host
    state_bytes: int = 0  # per sequence, if layers keep states; they take memory from the pool
    tower: Tower | None = None  # None: the model takes only text
    limits: StepLimits = StepLimits()  # of steps, where options leave them to the device

    def hello(self, config: Config) -> WorkerHello:
        """Return the hello of a worker that is started with these options."""
        config = replace(config, scheduler=self.limits.fill(config.scheduler))
        options = config.scheduler
        max_model_len = min(config.model.max_model_len or self.max_model_len, self.max_model_len)
        num_pages = config.worker.num_pages or self._num_pages(config, max_model_len)
        page_bytes = round(self.kv_bytes_per_token * options.page_size)
        host_bytes = config.of(HostOptions).num_bytes
        if host_bytes and not page_bytes:
            raise ConfigError(
                "--host-kv-gib: the size of a page is unknown; a step trace does not say, a recording does"
            )
        if num_pages < 1:
            less = "--page-size or --num-pages"
            less += ", or less --max-num-seqs or --state-snapshots-gib," if self.state_bytes else ""
            raise ConfigError(f"no page of keys and values fits; a smaller {less} may help")
        tower = self.tower
        return WorkerHello(
            protocol_version=PROTOCOL_VERSION,
            name="simulated",
            rank=0,
            model_fingerprint=self.name,
            device=self.name,
            dtype="",
            vocab_size=self.vocab_size,
            max_model_len=max_model_len,
            page_size=options.page_size,
            num_pages=num_pages,
            max_num_seqs=options.max_num_seqs,
            max_num_batched_tokens=options.max_num_batched_tokens,
            page_bytes=page_bytes,
            num_host_pages=host_bytes // page_bytes if page_bytes else 0,
            host_copy_speed=int(self.copy_speed),
            num_stages=len(self.device.stages),
            state_bytes=self.state_bytes,
            num_snapshots=num_snapshots(config, self.state_bytes, num_pages),
            max_embedding_bytes=0 if tower is None else tower.max_embedding_bytes,
            embedding_bytes=0 if tower is None else tower.embedding_bytes,
            images_are_whole=tower is not None and tower.images_are_whole,
        )

    def _num_pages(self, config: Config, max_model_len: int) -> int:
        most = self.num_slots // config.scheduler.page_size
        if not self.state_bytes:
            return most
        if not self.kv_bytes_per_token:
            return num_empty_pages(config, max_model_len)
        places = config.scheduler.max_num_seqs + 1 + num_snapshots(config, self.state_bytes, most)
        return most - ceil(places * self.state_bytes / (self.kv_bytes_per_token * config.scheduler.page_size))


class Measured(NamedTuple):
    """The contents of a real run's file."""

    machine: Machine
    steps: list[MeasuredStep]
    arrivals: list[Arrival]
    delays: list[Delays]  # of each arrival, at the scheduler; empty: not recorded
    page_size: int


def planned_machine(plan: Plan, efficiency: float) -> Machine:
    """Make a machine from a plan; a step takes its roofline's time divided by the efficiency.

    Raises:
        ConfigError: the model does not fit.
    """
    costs = plan.costs
    if plan.max_batch(1) == 0:
        raise ConfigError(f"the model does not fit {plan.layout.num_devices} x {plan.machine.name}; see --tp and --pp")
    return Machine(
        plan.machine.name,
        RooflineDevice(plan, efficiency),
        _TYPICAL,
        _num_slots(plan),
        costs.decoder.max_model_len,
        costs.decoder.vocab_size,
        costs.kv_bytes_per_token,
        state_bytes=costs.state_bytes,
        limits=plan.limits,
    )


def _num_slots(plan: Plan) -> int:
    """Return how many tokens' keys and values fit if no states are kept."""
    costs = plan.costs
    if not costs.state_bytes:
        return plan.max_batch(1)
    return int(plan.ledger.left / costs.kv_bytes_per_token) if costs.kv_bytes_per_token else 0


def measured(path: Path) -> Measured:
    """Make a machine from a recording (`--record`) or a step trace (`--step-trace`).

    Raises:
        ConfigError: the file is neither, or shows too few steps.
    """
    if not _is_recording(path):
        trace = read_trace(path)
        limits = StepLimits()  # a trace does not have them; sizes are in tokens from here on
        page_size = limits.page_size
        sizes = trace.num_pages * page_size, trace.num_pages * page_size, 1 << 16, 0.0
        state_bytes, tower = 0, None
        steps, arrivals, delays, admission = trace.steps, trace.arrivals, list[Delays](), 0.0
    else:
        run = read_run(path)
        hello = run.hello()
        limits = StepLimits(hello.max_num_seqs, hello.max_num_batched_tokens, hello.page_size)
        page_size = hello.page_size
        per_token, state_bytes = hello.page_bytes / page_size, hello.state_bytes
        num_slots = hello.num_pages * page_size
        if per_token:
            num_slots += int((hello.max_num_seqs + 1 + hello.num_snapshots) * state_bytes / per_token)
        sizes = num_slots, hello.max_model_len, hello.vocab_size, per_token
        steps, (arrivals, delays), admission = steps_of(run), arrivals_of(run), admission_of(run)
        tower = _tower(path, hello, arrivals, encoded_of(run))
    timing = fit_timing(steps)
    timing = replace(
        timing,
        request=_TYPICAL.request,
        reply=_TYPICAL.reply,
        admission=admission or _TYPICAL.admission,
        scheduler=timing.scheduler or _TYPICAL.scheduler,
    )
    machine = Machine(path.name, fit_device(steps), timing, *sizes, state_bytes=state_bytes, tower=tower, limits=limits)
    return Measured(machine, steps, arrivals, delays, page_size)


def _tower(
    path: Path, hello: WorkerHello, arrivals: Sequence[Arrival], encoded: Sequence[tuple[int, float]]
) -> Tower | None:
    if not any(each.images for each in arrivals):
        return None
    if not encoded:
        raise ConfigError(f"{path} has requests with images, but not what encoding these took: record again")
    sizes = hello.embedding_bytes, hello.max_embedding_bytes, hello.images_are_whole
    return Tower(fit_encoding(encoded), *sizes)


def _is_recording(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return file.read(1 << 10).find(b'"kind"') >= 0
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None


class Load(NamedTuple):
    """The requests that arrive, and the targets that count as good."""

    arrivals: Sequence[Arrival]
    targets: Targets = Targets()
    page_size: int = 16  # tokens of a page in the arrivals' `pages`
    seed: int = 0

    def requests(self, machine: Machine) -> list[AddRequest]:
        """Return the messages that clients send."""
        longest = max((each.input_len for each in self.arrivals), default=1)
        prompts = Prompts(machine.vocab_size, self.page_size, longest, self.seed)
        return messages(self.arrivals, map(prompts.make, self.arrivals), machine.timing, self.targets)


class Result(NamedTuple):
    """The outcome of the load under one configuration."""

    name: str
    figures: dict[str, Any]
    run: Run


def compare(
    machine: Machine,
    load: Load,
    configs: Mapping[str, Config],
    on_result: Callable[[Result], None] = lambda result: None,
) -> list[Result]:
    """Simulate the same load under each of these configurations.

    Raises:
        ConfigError: one of them cannot work.
        StuckError: one of them holds requests forever.
    """
    traces = [path for config in configs.values() if (path := config.of(RecordingOptions).step_trace)]
    if len(set(traces)) < len(traces):
        raise ConfigError("--step-trace: each configuration needs a file of its own")
    requests = load.requests(machine)
    results = []
    for name, config in configs.items():
        hello = machine.hello(config)
        path = config.of(RecordingOptions).step_trace
        trace = StepTrace(path) if path else None
        simulator = Simulator(
            config,
            hello,
            machine.device,
            machine.timing,
            load.arrivals,
            requests,
            seed=load.seed,
            trace=trace,
            encode_seconds=None if machine.tower is None else machine.tower.costs.seconds,
        )
        run = simulator.run()
        if trace is not None:
            trace.close()
        found = figures(run, load.arrivals, hello.num_pages, load.targets)
        results.append(Result(name, found, run))
        on_result(results[-1])
    return results


def with_clients(known: Measured, sent: Sequence[float], at_clients: Sequence[Delays]) -> Machine:
    """Return the machine with the measured delays between clients and scheduler.

    Args:
        known: with a recording's delays at the scheduler.
        sent: when each request's client sent it, by the clients' clock.
        at_clients: the delays of each request, as its client saw them.
    """
    pairs = list(zip(at_clients, known.delays, strict=True))
    longest = _usual(client.first - scheduler.first for client, scheduler in pairs)
    frontend = _frontend_time(sent, [each.time for each in known.arrivals], longest)
    ways = list(zip(at_clients, known.delays, frontend_waits(sent, frontend), strict=True))
    of_first = _usual(client.first - scheduler.first - wait for client, scheduler, wait in ways)
    of_last = _usual(client.last - scheduler.last - wait for client, scheduler, wait in ways)
    request = max(frontend, of_first / 2)
    reply = max(0.0, of_last - request)
    timing = replace(
        known.machine.timing,
        request=request,
        frontend=frontend,
        request_per_token=0.0,
        reply=reply,
        first=of_first - request - reply,
    )
    return known.machine._replace(timing=timing)


def _frontend_time(sent: Sequence[float], arrived: Sequence[float], longest: float) -> float:
    """Return the frontend's seconds per request that best explain why requests sent together take longer.

    Args:
        sent: when each request was sent, by the clients' clock.
        arrived: when it was at the scheduler, by another clock.
        longest: the most that the frontend can take.
    """
    ways = [at - since for at, since in zip(arrived, sent, strict=True)]

    def unexplained(busy: float) -> float:
        rest = [way - wait for way, wait in zip(ways, frontend_waits(sent, busy), strict=True)]
        usual = median(rest)
        return round(fsum(abs(each - usual) for each in rest), 9)  # less is the rounding of sums

    return min((longest * part / _NUM_PARTS for part in range(_NUM_PARTS + 1)), key=unexplained)


def _usual(ways: Iterable[float]) -> float:
    """Return the mean without the shortest and the longest, which may be stalls; at least 0."""
    ordered = sorted(ways)
    rare = len(ordered) // 20
    return max(0.0, fmean(ordered[rare : len(ordered) - rare])) if ordered else 0.0
