"""Fields of a serialized protocol buffer message, without the `protobuf` package."""

Fields = dict[int, list[int | bytes]]


class WireError(ValueError):
    """These bytes are no protocol buffer message."""


def fields(message: bytes) -> Fields:
    """Values by field number: ints of varints, bytes of all others (strings, messages, packed and fixed numbers).

    Raises:
      WireError: the message is cut off or is none.
    """
    found: Fields = {}
    at = 0
    while at < len(message):
        key, at = _varint(message, at)
        kind = key & 7
        if kind == 0:
            value, at = _varint(message, at)
        elif kind in (1, 2, 5):
            size, at = _varint(message, at) if kind == 2 else (8 if kind == 1 else 4, at)
            value, at = message[at : at + size], at + size
            if at > len(message):
                raise WireError(f"field {key >> 3} ends {at - len(message)} bytes behind the end of its message.")
        else:
            raise WireError(f"field {key >> 3} has the wire type {kind}, which no message has.")
        found.setdefault(key >> 3, []).append(value)
    return found


def number(message: Fields, field: int) -> int:
    """The field's last value, 0 if it is absent."""
    value = message.get(field, [0])[-1]
    if not isinstance(value, int):
        raise WireError(f"field {field} is no varint.")
    return value


def numbers(message: Fields, field: int) -> tuple[int, ...]:
    """A repeated field's values, packed or not."""
    found: list[int] = []
    for value in message.get(field, []):
        at = 0
        if isinstance(value, int):
            found.append(value)
            continue
        while at < len(value):
            each, at = _varint(value, at)
            found.append(each)
    return tuple(found)


def texts(message: Fields, field: int) -> list[bytes]:
    """A repeated field's strings or messages."""
    values = message.get(field, [])
    if not all(isinstance(value, bytes) for value in values):
        raise WireError(f"field {field} is a varint.")
    return [value for value in values if isinstance(value, bytes)]


def text(message: Fields, field: int) -> str:
    """The field's last string, empty if it is absent."""
    values = texts(message, field)
    return values[-1].decode(errors="replace") if values else ""


def _varint(message: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while at < len(message):
        byte = message[at]
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            return value, at
    raise WireError("a varint is cut off.")
