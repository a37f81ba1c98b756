"""Reads pickles of tensors as `torch.save` writes them, and runs nothing that they name.

A pickle is a program, and Python's own machine imports and calls whatever it names. This machine
has the opcodes and the names in its tables and rejects all others. It makes numbers, strings,
tuples, lists, dicts and descriptions of tensors; it imports nothing and calls nothing else.
"""

import pickletools
from collections.abc import Callable
from typing import Any, BinaryIO, NamedTuple

from specdec_jax.files.reading import quote_value

MOST_BYTES = 8 << 20  # of a file, without its tensors; a large T5 has some 400,000
_MOST_OPCODES = 200_000  # a T5 of 24 + 24 layers has some 30,000
_MOST_AXES = 8


class Storage(NamedTuple):
    """A block of numbers, which one or several tensors read.

    Attributes:
      dtype: numpy's name of the dtype.
      key: name of the block in the file.
      size: how many numbers it has.
    """

    dtype: str
    key: str
    size: int


class Tensor(NamedTuple):
    """A view of a storage; `offset` and `strides` count numbers, not bytes."""

    storage: Storage
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


class _Global(NamedTuple):
    """A name in a pickle: "module name"."""

    name: str


class BoundedReader:
    """A binary file of which nobody can read more than `MOST_BYTES` in all.

    A length in a hostile file could otherwise ask for all memory.
    """

    def __init__(self, file: BinaryIO):
        self._file, self._left = file, MOST_BYTES
        self.seek, self.tell, self.seekable = file.seek, file.tell, file.seekable

    def read(self, length: int = -1) -> bytes:
        """Returns the next `length` bytes, all for a negative number."""
        most = self._left + 1
        return self._count(self._file.read(most if length < 0 else min(length, most)))

    def readline(self) -> bytes:
        """Returns the bytes up to the end of the line."""
        return self._count(self._file.readline(self._left + 1))

    def _count(self, data: bytes) -> bytes:
        self._left -= len(data)
        if self._left < 0:
            raise ValueError(f"more than {MOST_BYTES:,} bytes that are not tensors'")
        return data


# numpy's dtypes of PyTorch's classes of storages, which lie in the module `torch`.
_STORAGES = {
    "torch FloatStorage": "float32",
    "torch HalfStorage": "float16",
    "torch BFloat16Storage": "bfloat16",
    "torch DoubleStorage": "float64",
    "torch LongStorage": "int64",
    "torch IntStorage": "int32",
    "torch ShortStorage": "int16",
    "torch CharStorage": "int8",
    "torch ByteStorage": "uint8",
    "torch BoolStorage": "bool",
}


def _make_dict(pairs: Any = ()) -> dict:
    """Returns what `OrderedDict(pairs)` would hold; Python 2 pickled it so."""
    made: dict = {}
    _set_items(made, [part for pair in pairs for part in _check_kind(pair, list, 2)])
    return made


def _make_tensor(storage: Any, offset: Any, shape: Any, strides: Any, *_: Any) -> Tensor:
    """Returns what `torch._utils._rebuild_tensor_v2` would view, within its storage."""
    _check_kind(storage, Storage)
    axes = len(_check_kind(shape, tuple))
    _check_kind(strides, tuple, axes)
    numbers = (offset, *shape, *strides)
    is_sound = axes <= _MOST_AXES and all(type(n) is int and 0 <= n < 2**63 for n in numbers)
    last = is_sound and offset + sum((size - 1) * step for size, step in zip(shape, strides))
    is_empty = 0 in shape
    if not is_sound or not (offset <= storage.size if is_empty else last < storage.size):
        view = f"offset {quote_value(offset)}, shape {quote_value(shape)}"
        view += f" and strides {quote_value(strides)}"
        raise ValueError(f"a tensor of {view} in {storage.size:,} numbers")
    return Tensor(storage, offset, shape, strides)


def _make_parameter(tensor: Any, *_: Any) -> Tensor:
    """Returns the tensor of a `torch.nn.Parameter`."""
    if not isinstance(tensor, Tensor):
        raise ValueError(f"a parameter of {quote_value(tensor)}")
    return tensor


_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "collections OrderedDict": _make_dict,
    "torch._utils _rebuild_tensor": _make_tensor,
    "torch._utils _rebuild_tensor_v2": _make_tensor,
    "torch._utils _rebuild_parameter": _make_parameter,
}


def _check_kind(value: Any, kind: type[Any], length: int | None = None) -> Any:
    """Returns a value of one kind; raises ValueError for others, or for another length."""
    if type(value) is not kind or (length is not None and len(value) != length):
        raise ValueError(f"{quote_value(value)} where a {kind.__name__} must be")
    return value


def _set_items(into: dict, parts: list) -> None:
    for key, value in zip(parts[::2], parts[1::2], strict=True):
        # The hash of nested tuples could take for ever.
        into[_check_kind(key, str)] = value


class _Machine:
    """Runs one pickle; every method raises an error for unsound contents."""

    def __init__(self) -> None:
        self.stack: list[Any] = []
        self.marks: list[int] = []  # heights of the stack
        self.memo: dict[int, Any] = {}
        self.storages: dict[str, Storage] = {}
        self.given = 0  # items in lists that calls were given

    def run(self, name: str, argument: Any) -> None:
        """Runs one opcode, by its name in `pickletools`."""
        stack = self.stack
        if name in _VALUES:
            stack.append(argument)
        elif name in _MAKERS:
            stack.append(_MAKERS[name]())
        elif name in _TUPLES:
            stack.append(tuple(reversed([stack.pop() for _ in range(_TUPLES[name])])))
        elif name in ("BINPUT", "LONG_BINPUT"):
            self.memo[argument] = stack[-1]
        elif name in ("BINGET", "LONG_BINGET"):
            stack.append(self.memo[argument])
        else:
            _ACTIONS[name](self, argument)

    def pop_marked(self) -> list:
        """Returns what lies above the last mark, and removes both."""
        start = self.marks.pop()
        marked = self.stack[start:]
        del self.stack[start:]
        return marked

    def add_mark(self, _: Any) -> None:
        """Marks the top of the stack."""
        self.marks.append(len(self.stack))

    def make_tuple(self, _: Any) -> None:
        """Pushes a tuple of what is marked."""
        self.stack.append(tuple(self.pop_marked()))

    def append_one(self, _: Any) -> None:
        """Appends the top to the list below it."""
        value = self.stack.pop()
        _check_kind(self.stack[-1], list).append(value)

    def append_marked(self, _: Any) -> None:
        """Appends what is marked to the list below it."""
        values = self.pop_marked()
        _check_kind(self.stack[-1], list).extend(values)

    def set_one(self, _: Any) -> None:
        """Puts the key and the value on top into the dict below them."""
        value, key = self.stack.pop(), self.stack.pop()
        _set_items(_check_kind(self.stack[-1], dict), [key, value])

    def set_marked(self, _: Any) -> None:
        """Puts the marked keys and values into the dict below them."""
        parts = self.pop_marked()
        _set_items(_check_kind(self.stack[-1], dict), parts)

    def drop_state(self, _: Any) -> None:
        """Drops the attributes of a dict, in which modules keep their versions."""
        self.stack.pop()
        _check_kind(self.stack[-1], dict)

    def push_name(self, name: str) -> None:
        """Pushes a name of the tables, and rejects every other one."""
        if name not in _STORAGES and name not in _FUNCTIONS:
            raise ValueError(f"the name {quote_value(name.replace(' ', '.'))}")
        self.stack.append(_Global(name))

    def call_function(self, _: Any) -> None:
        """Calls one of this module's functions in place of the named one."""
        arguments, called = self.stack.pop(), self.stack.pop()
        function = _FUNCTIONS.get(called.name) if isinstance(called, _Global) else None
        if function is None:
            raise ValueError(f"a call of {quote_value(called)}")
        # The same list can be given to many calls, and each makes a dict of it.
        self.given += sum(len(one) for one in _check_kind(arguments, tuple) if type(one) is list)
        if self.given > _MOST_OPCODES:
            raise ValueError(f"more than {_MOST_OPCODES:,} items given to calls")
        self.stack.append(function(*arguments))

    def push_storage(self, _: Any) -> None:
        """Pushes the storage that the tuple on top describes."""
        given = _check_kind(self.stack.pop(), tuple)
        # The place is a device's name; a legacy file has None or the part of a view after it.
        word, kind, key, _, count, *view = given
        dtype = _STORAGES.get(kind.name) if isinstance(kind, _Global) else None
        is_sound = type(key) is str and type(count) is int and 0 <= count < 2**63
        if word != "storage" or dtype is None or not is_sound or view not in ([], [None]):
            raise ValueError(f"the storage {quote_value(given)}")
        storage = Storage(dtype, key, count)
        if self.storages.setdefault(key, storage) != storage:
            raise ValueError(f"two storages with the key {quote_value(key)}")
        self.stack.append(storage)


# Opcodes that push their argument.
_VALUES = {
    *("BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT"),
    *("BINUNICODE", "BINSTRING", "SHORT_BINSTRING"),
}
_MAKERS: dict[str, Callable[[], Any]] = {
    "NONE": lambda: None,
    "NEWTRUE": lambda: True,
    "NEWFALSE": lambda: False,
    "EMPTY_TUPLE": tuple,
    "EMPTY_LIST": list,
    "EMPTY_DICT": dict,
}
_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
_ACTIONS: dict[str, Callable[[_Machine, Any], None]] = {
    "PROTO": lambda machine, version: None,
    "MARK": _Machine.add_mark,
    "TUPLE": _Machine.make_tuple,
    "APPEND": _Machine.append_one,
    "APPENDS": _Machine.append_marked,
    "SETITEM": _Machine.set_one,
    "SETITEMS": _Machine.set_marked,
    "BUILD": _Machine.drop_state,
    "GLOBAL": _Machine.push_name,
    "REDUCE": _Machine.call_function,
    "BINPERSID": _Machine.push_storage,
}
_KNOWN = {*_VALUES, *_MAKERS, *_TUPLES, *_ACTIONS}
_KNOWN |= {"BINPUT", "LONG_BINPUT", "BINGET", "LONG_BINGET"}


def read_pickle(file: BoundedReader) -> tuple[Any, dict[str, Storage]]:
    """Returns what the pickle at the file's position holds, and its storages by their keys.

    The position moves to the end of the pickle.

    Raises:
      ValueError: the pickle is unsound, or holds an opcode or a name outside this module's tables.
    """
    machine = _Machine()
    try:
        # The file has the methods of a stream that `genops` calls.
        opcodes = pickletools.genops(file)  # type: ignore[arg-type]
        for number, (opcode, argument, _) in enumerate(opcodes):
            if opcode.name == "STOP":
                break
            if opcode.name not in _KNOWN:
                raise ValueError(f"the opcode {opcode.name}")
            if number > _MOST_OPCODES:
                raise ValueError(f"more than {_MOST_OPCODES:,} opcodes")
            machine.run(opcode.name, argument)
        return machine.stack.pop(), machine.storages
    except (IndexError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"an unsound pickle: {type(error).__name__}") from None
