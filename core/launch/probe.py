"""`penstock probe`: check that a scheduler's event loop turns; even a stopped process accepts connections.

A health check for schedulers that are started without the supervisor: exit code 0 if it answers, even without a worker.
"""

import os
import sys
from collections.abc import Sequence
from pathlib import Path

import zmq

from penstock.config.argument_types import not_negative_float
from penstock.config.parser import Parser
from penstock.ipc.channel import SyncDealer
from penstock.ipc.codec import Codec
from penstock.ipc.key_file import KeyFileError, read_key_file
from penstock.ipc.messages import EngineReady, Probe, ToFrontend


def main(argv: Sequence[str] | None = None) -> int:
    """Ask once; return the exit code (0: it answers, 1: it does not, 2: invalid arguments)."""
    parser = Parser("penstock probe", "Ask a scheduler whether it answers.")
    parser.add_argument("address", help="the scheduler's --frontend-address, as seen from here")
    parser.add_argument(
        "--seconds", type=not_negative_float, default=5.0, help="how long to wait for the answer (default: 5)"
    )
    parser.add_argument(
        "--channel-key-file",
        type=Path,
        metavar="FILE",
        default=os.environ.get("PENSTOCK_CHANNEL_KEY_FILE") or None,
        help="the launch's keys, for a tcp:// address (PENSTOCK_CHANNEL_KEY_FILE)",
    )
    args = parser.parse_args(argv)
    try:
        keys = None if args.channel_key_file is None else read_key_file(Path(args.channel_key_file))
    except KeyFileError as error:
        print(f"penstock probe: {error}", file=sys.stderr)
        return 2
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    try:
        channel: SyncDealer[ToFrontend] = SyncDealer(context, args.address, "probe", Codec(ToFrontend), keys)
    except zmq.ZMQError as error:
        context.destroy(linger=0)
        print(f"penstock probe: {args.address!r} is no address of a scheduler: {error.strerror}", file=sys.stderr)
        return 2
    channel.send(Probe())
    answer = channel.receive(int(args.seconds * 1000))
    channel.close()
    context.term()
    if answer is None:
        print(f"penstock probe: no answer from {args.address} in {args.seconds:g} s", file=sys.stderr)
        return 1
    print("a worker is connected" if isinstance(answer, EngineReady) else "no worker is connected")
    return 0


if __name__ == "__main__":
    sys.exit(main())
