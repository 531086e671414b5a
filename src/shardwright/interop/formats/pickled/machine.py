"""Decode a pickle into inert values. Pure: nothing is imported, called or created but values of our own.

A pickle is a program for a stack machine. This machine knows its opcodes, and instead of Python's globals a table from
(module, name) to `Kind`s. A name that is not in the table is refused, and so is every opcode that could do something
else than build values: see docs/explanation/inert-pickles.md. The table's functions are ours; they build plain values.

Time and memory are bounded by the length of the pickle: no length that it claims is trusted.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from typing import Any, Final, TypeAlias, final

from shardwright.errors import PickleError

__all__ = ["Instance", "Kind", "Table", "read_pickle"]

_MAX_STACK: Final = 1 << 20  # values that wait for their container
_MAX_MARKS: Final = 4096
_MAX_INTEGER: Final = 1024  # bytes
_MAX_NAME: Final = 512  # characters of a module or a name
_MAX_KEY_DEPTH: Final = 8  # of tuples in keys: hashing is recursive
_CONTAINERS: Final = 250_000  # containers, for a short pickle,
_BYTES_PER_CONTAINER: Final = 12  # and further ones for its length
_BYTES_PER_MEMO: Final = 4  # as for containers, but a memo entry is smaller
_SET: Final = 4  # how many containers a set counts for, by its size
_MAX_SPARSE: Final = 1 << 16  # memo entries that are not in order


@final
class Kind:
    """The stand-in for a global that a pickle names: a constant, or a type.

    `make` is the function of ours that is applied where the pickle calls the global; None if it must not be called.
    `value` is what a constant stands for. `is_type` is True if the pickle may create an instance of it and set its
    fields.

    >>> Kind("torch.float32", value="float32").value
    'float32'
    """

    __slots__ = ("is_type", "make", "name", "value")

    def __init__(
        self, name: str, *, make: Callable[..., Any] | None = None, value: Any = None, is_type: bool = False
    ) -> None:
        self.name, self.make, self.value, self.is_type = name, make, value, is_type

    def __repr__(self) -> str:
        return f"Kind({self.name!r})"


@final
class Instance:
    """An instance of a type that a pickle names: its kind, arguments and state, of which nothing is interpreted.

    Compared by identity.

    >>> Instance(Kind("pathlib.PosixPath", is_type=True), ("a",))
    Instance('pathlib.PosixPath')
    """

    __slots__ = ("arguments", "kind", "state")

    def __init__(self, kind: Kind, arguments: tuple[Any, ...] = ()) -> None:
        self.kind, self.arguments = kind, arguments
        self.state: Any = None

    def __repr__(self) -> str:
        return f"Instance({self.kind.name!r})"


Table: TypeAlias = Mapping[tuple[str, str], Kind]


def read_pickle(
    data: bytes | memoryview, table: Table, where: str, *, persistent: Callable[[Any], Any] | None = None
) -> Any:
    """Return the value of a pickle; raise `PickleError`, which begins with `where`, for anything that is not inert.

    `persistent` resolves persistent ids; without it they are refused.

    >>> import pickle
    >>> read_pickle(pickle.dumps({"lr": 0.1, "steps": [1, 2]}), {}, "options")
    {'lr': 0.1, 'steps': [1, 2]}
    >>> read_pickle(b"cposix\\nsystem\\n.", {}, "options")
    Traceback (most recent call last):
    shardwright.errors.PickleError: options: not a pickle of protocol 2 to 5
    """
    if len(data) < 2 or data[0] != 0x80 or not 2 <= data[1] <= 5:
        raise PickleError(f"{where}: not a pickle of protocol 2 to 5")
    machine = _Machine(data, table, persistent)
    try:
        return machine.run()
    except PickleError as error:
        raise PickleError(f"{where}: {error}") from None
    except (IndexError, KeyError, TypeError, ValueError, OverflowError, struct.error, RecursionError) as error:
        raise PickleError(f"{where}: malformed pickle, at byte {machine.at}: {type(error).__name__}: {error}") from None


class _Machine:
    """The state of the machine: the stack of each open mark, the memo, and the position in the pickle."""

    def __init__(self, data: bytes | memoryview, table: Table, persistent: Callable[[Any], Any] | None) -> None:
        self.data, self.table, self.persistent = bytes(data), table, persistent
        self.at = 0
        self.end = len(data)
        self.stack: list[Any] = []
        self.below: list[list[Any]] = []  # the stacks below each open mark
        self.waiting = 0  # values in `below`
        self.memo: list[Any] = []
        self.sparse: dict[int, Any] = {}
        self.containers = _CONTAINERS + len(data) // _BYTES_PER_CONTAINER
        self.done = False

    def run(self) -> Any:
        data, opcodes = self.data, _OPCODES
        while not self.done:
            code = data[self.at]
            self.at += 1
            operation = opcodes[code]
            if operation is None:
                raise PickleError(f"the opcode {_NAMES.get(code, hex(code))} at byte {self.at - 1} is refused")
            operation(self)
            if len(self.stack) + self.waiting > _MAX_STACK:
                raise PickleError(f"more than {_MAX_STACK} values wait on its stack")
        if len(self.stack) != 1 or self.below:
            raise PickleError("it ends with an unfinished value")
        return self.stack[0]

    def take(self, count: int) -> bytes:
        """Return the next bytes; raise if the pickle is shorter than it says."""
        first = self.at
        last = first + count
        if count < 0 or last > self.end:
            raise PickleError(f"truncated: {count} bytes are announced at byte {first}, and {self.end - first} follow")
        self.at = last
        return self.data[first:last]

    def unsigned(self, size: int) -> int:
        return int.from_bytes(self.take(size), "little")

    def line(self) -> str:
        last = self.data.find(b"\n", self.at, self.at + _MAX_NAME + 1)
        if last < 0:
            raise PickleError(f"a name at byte {self.at} has no end")
        text = self.data[self.at : last].decode()
        self.at = last + 1
        return text

    def count(self, containers: int) -> None:
        self.containers -= containers
        if self.containers < 0:
            raise PickleError("it creates too many containers for its length")

    def popped(self) -> list[Any]:
        """Return the values above the last mark, and remove both."""
        if not self.below:
            raise PickleError(f"no mark is open at byte {self.at - 1}")
        values, self.stack = self.stack, self.below.pop()
        self.waiting -= len(self.stack)
        return values

    def find(self, module: Any, name: Any) -> Kind:
        if type(module) is not str or type(name) is not str or max(len(module), len(name)) > _MAX_NAME:
            raise PickleError("a global whose module or name is not a short str is refused")
        kind = self.table.get((module, name))
        if kind is None:
            raise PickleError(
                f"it names {f'{module}.{name}'!r}, which is not in the table of known names: refused, nothing was "
                "executed"
            )
        return kind

    # The operations, by opcode.

    def proto(self) -> None:
        if self.at != 1 or not 2 <= self.data[1] <= 5:
            raise PickleError(f"a second protocol, at byte {self.at - 1}")
        self.at += 1

    def frame(self) -> None:
        size = self.unsigned(8)
        if size > self.end - self.at:
            raise PickleError(f"truncated: a frame of {size} bytes is announced, and {self.end - self.at} follow")

    def stop(self) -> None:
        self.done = True

    def mark(self) -> None:
        if len(self.below) >= _MAX_MARKS:
            raise PickleError(f"more than {_MAX_MARKS} marks are open")
        self.waiting += len(self.stack)
        self.below.append(self.stack)
        self.stack = []

    def pop(self) -> None:
        if self.stack:
            self.stack.pop()
        else:
            self.popped()

    def pop_mark(self) -> None:
        self.popped()

    def dup(self) -> None:
        self.stack.append(self.stack[-1])

    def none(self) -> None:
        self.stack.append(None)

    def true(self) -> None:
        self.stack.append(True)

    def false(self) -> None:
        self.stack.append(False)

    def binint(self) -> None:
        self.stack.append(int.from_bytes(self.take(4), "little", signed=True))

    def binint1(self) -> None:
        self.stack.append(self.data[self.at])
        self.at += 1

    def binint2(self) -> None:
        self.stack.append(self.unsigned(2))

    def long1(self) -> None:
        self.stack.append(int.from_bytes(self.take(self.unsigned(1)), "little", signed=True))

    def long4(self) -> None:
        size = self.unsigned(4)
        if size > _MAX_INTEGER:
            raise PickleError(f"an integer of {size} bytes")
        self.stack.append(int.from_bytes(self.take(size), "little", signed=True))

    def binfloat(self) -> None:
        self.stack.append(struct.unpack(">d", self.take(8))[0])

    def short_text(self) -> None:
        self.stack.append(self.take(self.unsigned(1)).decode())

    def text4(self) -> None:
        self.stack.append(self.take(self.unsigned(4)).decode())

    def text8(self) -> None:
        self.stack.append(self.take(self.unsigned(8)).decode())

    def short_bytes(self) -> None:
        self.stack.append(self.take(self.unsigned(1)))

    def bytes4(self) -> None:
        self.stack.append(self.take(self.unsigned(4)))

    def bytes8(self) -> None:
        self.stack.append(self.take(self.unsigned(8)))

    def bytearray8(self) -> None:
        self.stack.append(bytearray(self.take(self.unsigned(8))))

    def empty_list(self) -> None:
        self.count(1)
        self.stack.append([])

    def empty_dict(self) -> None:
        self.count(1)
        self.stack.append({})

    def empty_set(self) -> None:
        self.count(_SET)
        self.stack.append(set())

    def empty_tuple(self) -> None:
        self.stack.append(())

    def tuple_(self) -> None:
        self.count(1)
        values = self.popped()
        self.stack.append(tuple(values))

    def tuple1(self) -> None:
        self._tuple(1)

    def tuple2(self) -> None:
        self._tuple(2)

    def tuple3(self) -> None:
        self._tuple(3)

    def _tuple(self, size: int) -> None:
        self.count(1)
        if len(self.stack) < size:
            raise PickleError("a tuple of more values than there are")
        self.stack[-size:] = [tuple(self.stack[-size:])]

    def list_(self) -> None:
        self.count(1)
        values = self.popped()
        self.stack.append(values)

    def dict_(self) -> None:
        self.count(1)
        values = self.popped()
        self.stack.append({})
        self._set(values)

    def frozenset_(self) -> None:
        self.count(_SET)
        values = self.popped()
        for value in values:
            _check_key(value)
        self.stack.append(frozenset(values))

    def append(self) -> None:
        value = self.stack.pop()
        self._extend([value])

    def appends(self) -> None:
        self._extend(self.popped())

    def _extend(self, values: list[Any]) -> None:
        target = self.stack[-1]
        if type(target) is not list:
            raise PickleError(f"it appends to a {type(target).__name__}")
        target.extend(values)

    def setitem(self) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        self._set([key, value])

    def setitems(self) -> None:
        self._set(self.popped())

    def _set(self, values: list[Any]) -> None:
        target = self.stack[-1]
        if type(target) is not dict or len(values) % 2:
            raise PickleError(f"it sets items of a {type(target).__name__}")
        keys = values[::2]
        for key in keys:
            if type(key) is not str:
                _check_key(key)
        before = len(target)
        target.update(zip(keys, values[1::2], strict=True))
        if len(target) != before + len(keys):
            raise PickleError("a dict has a key twice")

    def additems(self) -> None:
        values = self.popped()
        target = self.stack[-1]
        if type(target) is not set:
            raise PickleError(f"it adds items to a {type(target).__name__}")
        for value in values:
            _check_key(value)
        target.update(values)

    def memoize(self) -> None:
        self._put(len(self.memo))

    def binput(self) -> None:
        self._put(self.unsigned(1))

    def long_binput(self) -> None:
        self._put(self.unsigned(4))

    def _put(self, index: int) -> None:
        if index == len(self.memo):
            if index > _CONTAINERS + self.end // _BYTES_PER_MEMO:
                raise PickleError("it remembers too many values for its length")
            self.memo.append(self.stack[-1])
        elif index < len(self.memo):
            self.memo[index] = self.stack[-1]
        else:
            if len(self.sparse) >= _MAX_SPARSE:
                raise PickleError("its memo is numbered out of order")
            self.sparse[index] = self.stack[-1]

    def binget(self) -> None:
        self._get(self.unsigned(1))

    def long_binget(self) -> None:
        self._get(self.unsigned(4))

    def _get(self, index: int) -> None:
        if index < len(self.memo):
            self.stack.append(self.memo[index])
        elif index in self.sparse:
            self.stack.append(self.sparse[index])
        else:
            raise PickleError(f"it refers to memo {index}, which does not exist")

    def global_(self) -> None:
        module = self.line()
        self.stack.append(self.find(module, self.line()))

    def stack_global(self) -> None:
        name, module = self.stack.pop(), self.stack.pop()
        self.stack.append(self.find(module, name))

    def reduce(self) -> None:
        arguments, kind = self.stack.pop(), self.stack.pop()
        if type(kind) is not Kind or kind.make is None or type(arguments) is not tuple:
            shown = kind.name if type(kind) is Kind else f"a {type(kind).__name__}"
            raise PickleError(f"it calls {shown}, which is not a known function")
        self.count(1)
        self.stack.append(kind.make(*arguments))

    def newobj(self) -> None:
        arguments, kind = self.stack.pop(), self.stack.pop()
        self._new(kind, arguments)

    def newobj_ex(self) -> None:
        options, arguments, kind = self.stack.pop(), self.stack.pop(), self.stack.pop()
        if options != {}:
            raise PickleError("it creates an instance with keyword arguments")
        self._new(kind, arguments)

    def _new(self, kind: Any, arguments: Any) -> None:
        self.count(1)
        if type(kind) is not Kind or type(arguments) is not tuple:
            raise PickleError("it creates an instance of a value that is not a type")
        if kind.is_type:
            self.stack.append(Instance(kind, arguments))
        elif kind.make is not None:
            self.stack.append(kind.make(*arguments))
        else:
            raise PickleError(f"it creates an instance of {kind.name}, which is not a known type")

    def build(self) -> None:
        state, target = self.stack.pop(), self.stack[-1]
        if type(target) is Instance and target.state is None:
            target.state = state
        elif type(target) is not dict:  # the attributes of an OrderedDict are dropped
            shown = target.kind.name if type(target) is Instance else f"a {type(target).__name__}"
            raise PickleError(f"it sets the state of {shown}")

    def binpersid(self) -> None:
        if self.persistent is None:
            raise PickleError("it has a persistent id")
        self.stack.append(self.persistent(self.stack.pop()))


def _check_key(key: Any, depth: int = 0) -> None:
    """Raise unless a value may be hashed: a plain value, a short tuple of them, or an instance.

    The hash of an instance is its identity. Integers are short: long ones could be chosen to collide.
    """
    if type(key) is int and not -(1 << 60) < key < 1 << 60:
        raise PickleError("a key is a long integer")
    if type(key) is tuple:
        if depth >= _MAX_KEY_DEPTH or len(key) > 1 << 10:
            raise PickleError("a key is a long or deeply nested tuple")
        for item in key:
            _check_key(item, depth + 1)
    elif type(key) not in _KEY_TYPES:
        raise PickleError(f"a key has the type {type(key).__name__}")


_KEY_TYPES: Final = frozenset({str, int, float, bool, bytes, type(None), Instance, Kind})

_OPERATIONS: Final[dict[int, Callable[[_Machine], None]]] = {
    0x80: _Machine.proto,
    0x95: _Machine.frame,
    ord("."): _Machine.stop,
    ord("("): _Machine.mark,
    ord("0"): _Machine.pop,
    ord("1"): _Machine.pop_mark,
    ord("2"): _Machine.dup,
    ord("N"): _Machine.none,
    0x88: _Machine.true,
    0x89: _Machine.false,
    ord("J"): _Machine.binint,
    ord("K"): _Machine.binint1,
    ord("M"): _Machine.binint2,
    0x8A: _Machine.long1,
    0x8B: _Machine.long4,
    ord("G"): _Machine.binfloat,
    0x8C: _Machine.short_text,
    ord("X"): _Machine.text4,
    0x8D: _Machine.text8,
    ord("C"): _Machine.short_bytes,
    ord("B"): _Machine.bytes4,
    0x8E: _Machine.bytes8,
    0x96: _Machine.bytearray8,
    ord("]"): _Machine.empty_list,
    ord("}"): _Machine.empty_dict,
    0x8F: _Machine.empty_set,
    ord(")"): _Machine.empty_tuple,
    ord("t"): _Machine.tuple_,
    0x85: _Machine.tuple1,
    0x86: _Machine.tuple2,
    0x87: _Machine.tuple3,
    ord("l"): _Machine.list_,
    ord("d"): _Machine.dict_,
    0x91: _Machine.frozenset_,
    ord("a"): _Machine.append,
    ord("e"): _Machine.appends,
    ord("s"): _Machine.setitem,
    ord("u"): _Machine.setitems,
    0x90: _Machine.additems,
    0x94: _Machine.memoize,
    ord("q"): _Machine.binput,
    ord("r"): _Machine.long_binput,
    ord("h"): _Machine.binget,
    ord("j"): _Machine.long_binget,
    ord("c"): _Machine.global_,
    0x93: _Machine.stack_global,
    ord("R"): _Machine.reduce,
    0x81: _Machine.newobj,
    0x92: _Machine.newobj_ex,
    ord("b"): _Machine.build,
    ord("Q"): _Machine.binpersid,
}
_OPCODES: Final = tuple(_OPERATIONS.get(code) for code in range(256))
# Known opcodes that are refused: text of protocol 0, Python 2's strings, classes called in place, the extension
# registry, and buffers that come from elsewhere.
_NAMES: Final = {
    ord("I"): "INT",
    ord("L"): "LONG",
    ord("F"): "FLOAT",
    ord("S"): "STRING",
    ord("T"): "BINSTRING",
    ord("U"): "SHORT_BINSTRING",
    ord("V"): "UNICODE",
    ord("P"): "PERSID",
    ord("g"): "GET",
    ord("p"): "PUT",
    ord("i"): "INST",
    ord("o"): "OBJ",
    0x82: "EXT1",
    0x83: "EXT2",
    0x84: "EXT4",
    0x97: "NEXT_BUFFER",
    0x98: "READONLY_BUFFER",
}
