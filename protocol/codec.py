"""Canonical msgpack: the only encoder and decoder of anything that is hashed or signed.

1. Values are arrays, integers 0 to 2**63 - 1, bytes, printable-ASCII strings and nil. No floats, booleans,
   maps or extension types: their encodings are not unique, or their equality differs between languages.
2. Bytes are decoded, re-encoded and compared; a difference is a ``PeerError`` (over-long integers, trailing
   bytes and duplicate encodings pass msgpack's own decoder silently).
3. Size and depth are bounded before anything is built from them.
4. The shape of a decoded value is checked by a schema (``Int``, ``Bytes``, ``Text``, ``Optional``, ``Many``,
   ``Array``), so that the code behind it indexes without fear.

Format: https://github.com/msgpack/msgpack/blob/master/spec.md
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import UnionType
from typing import Annotated, Any, ClassVar, Final, Self, Union, get_args, get_origin, get_type_hints

import msgpack

from protocol import constants
from protocol.constants import MAX_DEPTH
from protocol.errors import LocalError, PeerError

MAX_INT = 2**63 - 1

FAILED: Final = object()
"""No value: what ``attempt`` answers instead of an error."""

_FAILURES: Final = (ValueError, TypeError, OverflowError, RecursionError, msgpack.UnpackException)

# A value of the canonical subset: int, bytes, str, None, or a list or tuple of values.
Value = Any


def _check(value: Value, depth: int) -> None:
    if value is None or type(value) is bytes:
        return
    if type(value) is int:
        if not 0 <= value <= MAX_INT:
            raise ValueError("an integer is out of range")
    elif type(value) is str:
        if not (value.isascii() and value.isprintable()):
            raise ValueError("a string is not printable ASCII")
    elif type(value) in (list, tuple):
        if depth == 0:
            raise ValueError("nesting is too deep")
        for item in value:
            _check(item, depth - 1)
    else:
        raise ValueError(f"a {type(value).__name__} has no canonical encoding")


def encode(value: Value) -> bytes:
    """The one encoding of ``value``. Raises ``LocalError`` for anything outside the canonical subset."""
    try:
        _check(value, MAX_DEPTH)
    except ValueError as error:
        raise LocalError(f"cannot encode: {error}") from None
    packed: bytes = msgpack.packb(value, use_bin_type=True)
    return packed


def decode(data: bytes, *, max_bytes: int, what: str = "object") -> Value:
    """Decode ``data`` into lists, ints, bytes, strings and None, or raise ``PeerError``.

    ``max_bytes`` bounds the input, ``what`` names it in the error.
    """
    if len(data) > max_bytes:
        raise PeerError(f"{what}: {len(data)} bytes, at most {max_bytes} are allowed")
    try:
        # msgpack's own recursion limit is 1024 (its StackError is a ValueError); ours is checked below.
        value = msgpack.unpackb(data, use_list=True, raw=False, strict_map_key=True, max_map_len=0, max_ext_len=0)
        _check(value, MAX_DEPTH)
        canonical = msgpack.packb(value, use_bin_type=True)
    except _FAILURES as error:
        raise PeerError(f"{what}: not canonical msgpack ({error})") from None
    if canonical != data:
        raise PeerError(f"{what}: not the canonical encoding")
    return value


@dataclass(frozen=True, slots=True)
class Int:
    """An integer ``low <= value <= high``."""

    low: int = 0
    high: int = MAX_INT


@dataclass(frozen=True, slots=True)
class Bytes:
    """A byte string of exactly ``size`` bytes, or of at most ``most`` where ``size`` is None. In a field of ``Fields``
    it may stand for what ``parse`` makes of it, or raises ``PeerError``, and ``pack`` makes it of."""

    size: int | None = None
    most: int = MAX_INT
    parse: Callable[[bytes], Any] | None = None
    pack: Callable[[Any], bytes] | None = None


@dataclass(frozen=True, slots=True)
class Text:
    """A printable-ASCII string of at most ``most`` characters, one of ``choices`` where given."""

    most: int = 255
    choices: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True)
class Optional:
    """nil or a value of ``schema``."""

    schema: Schema


@dataclass(frozen=True, slots=True)
class Many:
    """An array of at least ``least`` and at most ``most`` values of one ``schema``."""

    schema: Schema
    most: int
    least: int = 0


@dataclass(frozen=True, slots=True)
class Array:
    """An array with exactly these fields, named for error messages; ``made`` is the class that it stands for."""

    fields: tuple[tuple[str, Schema], ...]
    made: type[Fields] | None = None


@dataclass(frozen=True, slots=True)
class Anything:
    """Any canonical value: checked later, once a field before it tells which schema holds."""


@dataclass(frozen=True, slots=True)
class Tagged:
    """An array in which the string at ``place`` tells which of the schemas holds."""

    place: int
    schemas: Mapping[str, Schema]


Schema = Int | Bytes | Text | Optional | Many | Array | Anything | Tagged

HASH = Bytes(32)
KEY = Bytes(32)
SIGNATURE = Bytes(64)
Hash = Annotated[bytes, HASH]
Key = Annotated[bytes, KEY]
Signature = Annotated[bytes, SIGNATURE]


def envelope(most: int) -> Array:
    """What a signed body of at most ``most`` bytes travels as: ``[body, signature]``."""
    return Array((("body", Bytes(most=most)), ("signature", SIGNATURE)))


class Fields:
    """Base of classes whose fields carry their schemas: ``count: Annotated[int, Int(0, 9)]``, or are of such a class
    themselves. ``SCHEMA`` has them in the order of declaration, without those that carry none; ``ARRAY`` is the schema
    of a whole, which begins with the number ``FORMAT`` where there is one."""

    __slots__ = ()
    FORMAT: ClassVar[int | None] = None
    SCHEMA: ClassVar[tuple[tuple[str, Schema], ...]] = ()
    ARRAY: ClassVar[Array] = Array(())
    _NESTED: ClassVar[bool] = False

    def __init_subclass__(cls) -> None:
        hints = get_type_hints(cls, include_extras=True)
        declared = {name: _declared(hint) for name, hint in hints.items()}
        cls.SCHEMA = tuple((name, schema) for name, schema in declared.items() if schema is not None)
        head = () if cls.FORMAT is None else (("format", Int(cls.FORMAT, cls.FORMAT)),)
        cls.ARRAY = Array((*head, *cls.SCHEMA), cls)
        cls._NESTED = any(_nested(schema) for _, schema in cls.SCHEMA)

    def to_value(self) -> list[Any]:
        """What ``ARRAY`` describes, ready for ``encode``."""
        head = [] if self.FORMAT is None else [self.FORMAT]
        return head + [_plain(getattr(self, name), schema) for name, schema in self.SCHEMA]

    @classmethod
    def from_value(cls, value: Value, **more: Any) -> Self:
        """The inverse of ``to_value`` for a value that was checked against ``ARRAY``; ``more`` are the fields behind
        these, which carry no schema. Raises ``PeerError`` where a part cannot be parsed."""
        items = value if cls.FORMAT is None else value[1:]
        if cls._NESTED:
            items = [_built(item, schema) for item, (_, schema) in zip(items, cls.SCHEMA, strict=True)]
        return cls(*items, **more)


def _declared(hint: Any) -> Schema | None:
    """The schema of a field with this type."""
    if get_origin(hint) is Annotated:
        schema: Schema | None = hint.__metadata__[0]
        return schema
    if get_origin(hint) in (Union, UnionType) and get_args(hint)[1:] == (type(None),):
        inner = _declared(get_args(hint)[0])
        return None if inner is None else Optional(inner)
    return hint.ARRAY if isinstance(hint, type) and issubclass(hint, Fields) else None


def _nested(schema: Schema) -> bool:
    """Whether fields of this schema hold something else than the value."""
    match schema:
        case Optional(inner):
            return _nested(inner)
        case Bytes():
            return schema.parse is not None
    return isinstance(schema, Many | Array)


def _plain(item: Any, schema: Schema) -> Value:
    match schema:
        case Optional(inner) if item is not None:
            return _plain(item, inner)
        case Many(inner):
            return [_plain(one, inner) for one in item]
        case Array(fields, None):
            return [_plain(one, inner) for one, (_, inner) in zip(item, fields, strict=True)]
        case Array():
            return item.to_value()
        case Bytes() if schema.pack is not None:
            return schema.pack(item)
    return item


def _built(value: Value, schema: Schema) -> Any:
    match schema:
        case Optional(inner) if value is not None:
            return _built(value, inner)
        case Many(inner):
            return tuple([_built(item, inner) for item in value])
        case Array(fields, None):
            return tuple([_built(item, inner) for item, (_, inner) in zip(value, fields, strict=True)])
        case Array(_, made) if made is not None:
            return made.from_value(value)
        case Bytes() if schema.parse is not None:
            return schema.parse(value)
    return value


class Formatted(Fields):
    """The base of what begins with the number of the protocol's format."""

    __slots__ = ()
    FORMAT = constants.FORMAT


def check(value: Value, schema: Schema, what: str) -> None:
    """Check ``value`` against ``schema``; raises ``PeerError`` naming the first field that does not fit."""
    if _test(schema)(value):
        return
    match schema:
        case Int(low, high):
            problem = f"expected an integer from {low} to {high}"
        case Bytes():
            problem = f"wrong length ({len(value)} bytes)" if type(value) is bytes else "expected bytes"
        case Text(_, choices):
            problem = "expected " + (f"one of {', '.join(choices)}" if choices else "a short string")
        case Optional(inner):
            return check(value, inner, what)
        case Many(inner, most, least):
            if type(value) is list and least <= len(value) <= most:
                for item in value:
                    check(item, inner, what)
            problem = f"expected an array of {least} to {most} items"
        case Array(fields):
            if type(value) is list and len(value) == len(fields):
                for item, (name, inner) in zip(value, fields, strict=True):
                    check(item, inner, f"{what}.{name}")
            problem = f"expected an array of {len(fields)} fields"
        case Tagged(place, schemas):
            tag = value[place] if type(value) is list and place < len(value) else None
            if type(tag) is str and tag in schemas:
                return check(value, schemas[tag], what)
            problem = f"expected one of {', '.join(schemas)} in field {place}"
        case Anything():
            problem = "no canonical value"
    raise PeerError(f"{what}: {problem}")


def parse(data: bytes, schema: Schema, *, max_bytes: int, what: str) -> Value:
    """``decode`` and check in one go: the way every parser of the protocol begins."""
    value = attempt(data, schema, max_bytes=max_bytes)
    if value is FAILED:
        # The slow way says what is wrong.
        value = decode(data, max_bytes=max_bytes, what=what)
        check(value, schema, what)
    return value


def attempt(data: bytes, schema: Schema, *, max_bytes: int) -> Value:
    """What ``parse`` returns, or ``FAILED`` where it would raise."""
    if len(data) <= max_bytes:
        try:
            value = msgpack.unpackb(data, use_list=True, raw=False, strict_map_key=True, max_map_len=0, max_ext_len=0)
            if _test(schema)(value) and msgpack.packb(value, use_bin_type=True) == data:
                return value
        except _FAILURES:
            pass
    return FAILED


def pack_pair(first: bytes, second: bytes) -> bytes:
    """``encode([first, second])`` for two byte strings, several times as fast."""
    return b"".join((b"\x92", _bytes_header(len(first)), first, _bytes_header(len(second)), second))


def split_pair(data: bytes, second: int) -> tuple[bytes, bytes] | None:
    """(first, second) where ``data`` is ``pack_pair`` of them, the first has less than 64 KiB and the second as many
    bytes as ``second`` (less than 256) says; None otherwise."""
    start = 4 if data.startswith(b"\x92\xc5") else 3
    size = int.from_bytes(data[2:start], "big")
    end = start + size
    if len(data) != end + 2 + second or data[end] != 0xC4 or data[end + 1] != second:
        return None
    # A short one behind the long header is another encoding of the same.
    if not data.startswith(b"\x92\xc4") and (start == 3 or size < 1 << 8):
        return None
    return data[start:end], data[end + 2 :]


def _bytes_header(size: int) -> bytes:
    if size < 1 << 8:
        return bytes((0xC4, size))
    if size < 1 << 16:
        return b"\xc5" + size.to_bytes(2, "big")
    return b"\xc6" + size.to_bytes(4, "big")


def fits(value: Value, schema: Schema) -> bool:
    """Whether ``check`` would let a decoded value pass; several times as fast."""
    return _test(schema)(value)


Test = Callable[[Value], bool]
_TESTS: Final[dict[int, tuple[Schema, Test]]] = {}


def _test(schema: Schema) -> Test:
    # By identity, since hashing a schema takes longer than testing a value. What is kept here keeps its identity.
    found = _TESTS.get(id(schema))
    if found is None:
        found = _TESTS[id(schema)] = (schema, _compiled(schema, MAX_DEPTH))
    return found[1]


def _compiled(schema: Schema, depth: int) -> Test:
    """The test of a value that stands where ``depth`` levels of arrays are left."""
    match schema:
        case Int(low, high):
            return lambda value: type(value) is int and low <= value <= high
        case Bytes(None, most):
            return lambda value: type(value) is bytes and len(value) <= most
        case Bytes(size, most):
            return lambda value: type(value) is bytes and len(value) == size and len(value) <= most
        case Text(most, None):
            return lambda value: type(value) is str and len(value) <= most and value.isascii() and value.isprintable()
        case Text(_, choices):
            allowed = frozenset(choice for choice in choices or () if len(choice) <= schema.most)
            return lambda value: type(value) is str and value in allowed
        case Optional(inner):
            test = _compiled(inner, depth)
            return lambda value: value is None or test(value)
        case Many(inner, most, least):
            test = _compiled(inner, depth - 1)
            return lambda value: type(value) is list and least <= len(value) <= most and all(map(test, value))
        case Array(fields):
            tests = [_compiled(inner, depth - 1) for _, inner in fields]
            count = len(tests)

            def whole(value: Value) -> bool:
                if type(value) is not list or len(value) != count:
                    return False
                for test, item in zip(tests, value, strict=True):  # noqa: SIM110  # a generator takes twice as long
                    if not test(item):
                        return False
                return True

            return whole
        case Tagged(place, schemas):
            by_tag = {tag: _compiled(inner, depth) for tag, inner in schemas.items()}

            def tagged(value: Value) -> bool:
                if type(value) is not list or len(value) <= place:
                    return False
                tag = value[place]
                return type(tag) is str and tag in by_tag and by_tag[tag](value)

            return tagged
        case Anything():
            return lambda value: _canonical(value, depth)


def _canonical(value: Value, depth: int) -> bool:
    try:
        _check(value, depth)
    except ValueError:
        return False
    return True
