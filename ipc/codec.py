"""Messages to bytes and back. One codec per direction of a channel; never pickle."""

from typing import Any, Generic, TypeVar

import msgspec

from penstock.ipc.messages import Message

In = TypeVar("In")


class MalformedMessage(ValueError):
    """Bytes that are not a message of the expected kinds, or a message that is invalid from this sender.

    The channel drops and counts them.
    """


class Codec(Generic[In]):
    """Encodes any `Message`; decodes and validates those of `incoming` (a union of Message types)."""

    def __init__(self, incoming: Any) -> None:
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[In] = msgspec.msgpack.Decoder(incoming)

    def encode(self, message: Message) -> bytes:
        return self._encoder.encode(message)

    def decode(self, frame: bytes | memoryview) -> In:
        """
        Raises:
            MalformedMessage: if the frame is not one of the incoming messages.
        """
        try:
            return self._decoder.decode(frame)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise MalformedMessage(str(error)) from None
