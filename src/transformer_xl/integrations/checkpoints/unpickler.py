"""Read pickles without executing them: an interpreter of pickle's opcodes that builds plain data and nothing else.

A pickle is a program for a small stack machine: each opcode pushes a value, builds a container, or names a class or
function and calls it. Python's own unpickler imports those names and calls them, so loading a pickle can run any code.
Here dictionaries, lists, strings and numbers are built (the dictionaries of `collections` become plain ones), and every
class or function stays a name: a call is recorded as a `PickledObject`. Nothing is imported, nothing is called and no
attribute of any object is set, and no setting changes that.

As a second line of defence the caller lists the names that it expects. Any other name rejects the whole file, with a
message that contains the name.

The standard library's disassembler, `pickletools`, which executes nothing either, parses the opcodes and their
arguments. docs/design.md says why `torch.load(weights_only=True)` is not used.
"""

from __future__ import annotations

import pickletools
from collections.abc import Callable, Container
from dataclasses import dataclass
from typing import IO, Any, cast

from transformer_xl.config import UserError

_PYTHON_2_MODULES = {"__builtin__": "builtins", "copy_reg": "copyreg"}
_DICTIONARIES = frozenset({"collections.OrderedDict", "collections.Counter", "builtins.dict"})
_ALWAYS_ALLOWED = _DICTIONARIES | {
    "collections.defaultdict", "_codecs.encode", "copyreg._reconstructor",
    *(f"builtins.{name}" for name in ("list", "set", "frozenset", "tuple", "int", "long", "float", "bool", "str",
                                      "unicode", "bytes", "bytearray", "object")),
}  # fmt: skip
"""Names with which pickle itself writes plain values."""

# Limits above those of real checkpoints, against files that are made to exhaust time or memory. The largest published
# vocabulary (One Billion Word, 793,471 words) was pickled by Python 2, which writes an OrderedDict as a list of pairs,
# each a list: 6.4 million opcodes, and 1.6 million lists and MARKs.
_MAX_OPCODES = 8_000_000
_MAX_OBJECTS = 2_000_000  # containers, names and calls take far more memory than the few bytes that create them
_MAX_LINE = 2**20  # bytes of an argument that ends with a newline, as in protocol 0
_MAX_INT_BITS = 8192  # converting a longer integer to decimal digits takes quadratic time
# Integers can be chosen so that a dictionary of them takes hours. Such keys are above 2**24 or so, where real ones are
# rare: the addresses of parameters in an optimizer's state.
_LARGE_KEY, _MAX_LARGE_KEYS = 2**24, 10_000


@dataclass(frozen=True, slots=True)
class GlobalName:
    """A class or function that a pickle names; it is not looked up."""

    path: str
    """Module and name, such as `argparse.Namespace`."""


@dataclass(eq=False, slots=True)
class PickledObject:
    """A call that a pickle asked for, recorded instead of executed."""

    name: str
    """Path of the class or function that would be called."""
    arguments: tuple[Any, ...] = ()
    state: Any = None
    """The state that the object would get afterwards; for most classes its attributes."""

    @property
    def attributes(self) -> dict[str, Any]:
        """The attributes of the object, empty if its state is not a dictionary of attributes."""
        state = self.state[0] if isinstance(self.state, tuple) and len(self.state) == 2 else self.state
        return state if isinstance(state, dict) else {}


def read_pickle(file: IO[bytes], allowed: Container[str], source: str, persistent_load: Callable[[Any], Any]) -> Any:
    """Read one pickle; afterwards the file is positioned at the byte after it.

    Args:
        file: a file that allocates no more than it contains when more is requested, as io.BytesIO and mmap do.
        allowed: the names that may occur, such as `argparse.Namespace`, besides those with which pickle writes plain
            values.
        source: path of the file, for messages.
        persistent_load: returns the value for the id of something stored outside the pickle, as torch.save stores the
            elements of tensors; raises ValueError or UserError if the id is invalid.

    Raises:
        UserError: a name is not allowed, this is not a complete pickle, or it has more values than a real checkpoint.
    """
    machine = _Machine(allowed, source, persistent_load)
    try:
        opcodes = pickletools.genops(cast("IO[bytes]", _ShortLines(file)))
        for count, (opcode, argument, position) in enumerate(opcodes, start=1):
            machine.position = position or 0
            machine.check_limit(count, _MAX_OPCODES)
            OPCODES[opcode.name](machine, argument)
        return machine.stack.pop()
    except UserError:
        raise
    except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, MemoryError, RecursionError):
        raise UserError(f"{source} is damaged, or not a pickle (at byte {machine.position:,}); get it again") from None


class _ShortLines:
    """A file whose lines have at most `_MAX_LINE` bytes; pickletools refuses a line without its newline."""

    def __init__(self, file: IO[bytes]) -> None:
        self.read, self.tell, self._readline = file.read, file.tell, file.readline

    def readline(self) -> bytes:
        return self._readline()[:_MAX_LINE]


def _check(condition: bool) -> None:
    """Raise the error that `read_pickle` turns into a message if the condition is false."""
    if not condition:
        raise ValueError


class _Machine:
    """The state of pickle's stack machine: the stack, the stacks below each open MARK, and the memo (saved values)."""

    def __init__(self, allowed: Container[str], source: str, persistent_load: Callable[[Any], Any]) -> None:
        self._allowed, self._source, self.persistent_load = allowed, source, persistent_load
        self.stack: list[Any] = []
        self.stacks_below_marks: list[list[Any]] = []
        self.memo: dict[int, Any] = {}
        self.position = self.num_copied = self.num_objects = self.num_large_keys = 0

    def push(self, value: Any) -> None:
        _check(not isinstance(value, int) or value.bit_length() <= _MAX_INT_BITS)
        self.stack.append(value)

    def push_object(self, value: object) -> None:
        """Push a container, a name or a call, and count it."""
        self.count_object()
        self.stack.append(value)

    def count_object(self) -> None:
        self.num_objects += 1
        self.check_limit(self.num_objects, _MAX_OBJECTS)

    def check_limit(self, count: int, limit: int) -> None:
        """Refuse a small file that takes a lot of memory or time."""
        if count > limit:
            raise UserError(
                f"{self._source} has more values than a real checkpoint or vocabulary (at byte {self.position:,}); it "
                "may be malicious, and is not used"
            )

    def push_python_2_string(self, value: str) -> None:
        """Push a string of Python 2: text if its bytes are UTF-8, else the bytes."""
        content = value.encode("latin-1")
        try:
            self.push(content.decode("utf-8"))
        except UnicodeDecodeError:
            self.push(content)

    def mark(self) -> None:
        self.count_object()
        self.stacks_below_marks.append(self.stack)
        self.stack = []

    def pop_mark(self) -> list[Any]:
        """Return everything above the last MARK."""
        values, self.stack = self.stack, self.stacks_below_marks.pop()
        return values

    def pop(self, count: int) -> list[Any]:
        return [self.stack.pop() for _ in range(count)][::-1]

    def memoize(self, index: int) -> None:
        _check(0 <= index <= self.position)  # an index is the number of values that are saved before
        self.memo[index] = self.stack[-1]

    def push_global(self, module: Any, name: Any) -> None:
        _check(isinstance(module, str) and isinstance(name, str))
        path = f"{_PYTHON_2_MODULES.get(module, module)}.{name}"
        # a name with a dot is an attribute of what the module contains
        if "." in name or (path not in _ALWAYS_ALLOWED and path not in self._allowed):
            raise UserError(
                f"{self._source} names {ascii(path)[1:-1][:120]}, which does not belong in a checkpoint or vocabulary; "
                "the file may be malicious: nothing in it was executed, and it is not used"
            )
        self.push_object(GlobalName(path))

    def call(self, function: Any, arguments: Any) -> None:
        """Push the plain value that a call would return, or else the record of the call."""
        _check(isinstance(function, GlobalName) and isinstance(arguments, tuple))
        if function.path in _DICTIONARIES:
            self._count_copied(sum(map(len, arguments)))
            (items,) = arguments or ([],)
            pairs = items.items() if isinstance(items, dict) else items
            self.push_dictionary([item for key, value in pairs for item in (key, value)])
        elif function.path == "_codecs.encode":  # how protocols 0 to 2 write bytes
            self._count_copied(len(arguments[0]))
            self.push(arguments[0].encode("latin-1"))
        elif function.path == "collections.defaultdict":
            self.push_object({})
        elif function.path == "builtins.bytes" and not arguments:
            self.push(b"")
        else:
            if function.path == "copyreg._reconstructor":  # creates an instance of its first argument
                function, arguments = arguments[0], ()
            self.push_object(PickledObject(function.path, arguments))

    def call_class(self, values: list[Any]) -> None:
        """Call the first value, a class, with the other values as arguments."""
        self.call(values[0], tuple(values[1:]))

    def _count_copied(self, length: int) -> None:
        """Refuse a small file that fills the memory by copying one value many times.

        In total, no more items or characters may be copied than bytes of the file have been read.
        """
        self.num_copied += length
        _check(self.num_copied <= self.position)

    def build(self) -> None:
        """Take a state and an object from the stack, record the state in the object, and push the object again."""
        target, state = self.pop(2)
        _check(isinstance(target, (PickledObject, dict)))  # the attributes of a dictionary are not needed
        if isinstance(target, PickledObject):
            target.state = state
        self.push(target)

    def extend(self, values: list[Any]) -> None:
        target = self.stack[-1]
        _check(isinstance(target, (PickledObject, list)))  # the entries of other classes are not needed
        if isinstance(target, list):
            target.extend(values)

    def set_items(self, values: list[Any]) -> None:
        target, keys = self.stack[-1], values[::2]
        # Tuples are not allowed: hashing one recurses as deeply as the file nests it, and overflows the C stack.
        _check(all(isinstance(key, str | bytes | int | None) for key in keys))
        self.num_large_keys += sum(abs(key) > _LARGE_KEY for key in keys if isinstance(key, int))
        _check(self.num_large_keys <= _MAX_LARGE_KEYS)
        _check(isinstance(target, (PickledObject, dict)))
        if isinstance(target, dict):
            target.update(zip(keys, values[1::2], strict=True))

    def push_dictionary(self, values: list[Any]) -> None:
        self.push_object({})
        self.set_items(values)


_Step = Callable[[_Machine, Any], object]
"""Executes an opcode on the machine; the second parameter is the opcode's argument in the file, if it has one."""

_STEPS: dict[str, _Step] = {
    "PROTO FRAME STOP": lambda m, _: None,
    # plain values
    "INT BININT BININT1 BININT2 LONG LONG1 LONG4 FLOAT BINFLOAT STRING UNICODE BINUNICODE SHORT_BINUNICODE BINUNICODE8 "
    "BINBYTES SHORT_BINBYTES BINBYTES8 BYTEARRAY8": _Machine.push,
    "BINSTRING SHORT_BINSTRING": _Machine.push_python_2_string,
    "NONE": lambda m, _: m.push(None),
    "NEWTRUE": lambda m, _: m.push(True),
    "NEWFALSE": lambda m, _: m.push(False),
    "EMPTY_TUPLE": lambda m, _: m.push(()),
    "EMPTY_DICT": lambda m, _: m.push_object({}),
    "EMPTY_LIST EMPTY_SET": lambda m, _: m.push_object([]),  # a list, because members of a set would have to be hashed
    # containers
    "TUPLE": lambda m, _: m.push_object(tuple(m.pop_mark())),
    "TUPLE1": lambda m, _: m.push_object(tuple(m.pop(1))),
    "TUPLE2": lambda m, _: m.push_object(tuple(m.pop(2))),
    "TUPLE3": lambda m, _: m.push_object(tuple(m.pop(3))),
    "LIST FROZENSET": lambda m, _: m.push_object(m.pop_mark()),
    "DICT": lambda m, _: m.push_dictionary(m.pop_mark()),
    "APPEND": lambda m, _: m.extend(m.pop(1)),
    "APPENDS ADDITEMS": lambda m, _: m.extend(m.pop_mark()),
    "SETITEM": lambda m, _: m.set_items(m.pop(2)),
    "SETITEMS": lambda m, _: m.set_items(m.pop_mark()),
    # stack and memo
    "MARK": lambda m, _: m.mark(),
    "POP": lambda m, _: m.pop(1) if m.stack else m.pop_mark(),
    "POP_MARK": lambda m, _: m.pop_mark(),
    "DUP": lambda m, _: m.push(m.stack[-1]),
    "PUT BINPUT LONG_BINPUT": _Machine.memoize,
    "MEMOIZE": lambda m, _: m.memoize(len(m.memo)),
    "GET BINGET LONG_BINGET": lambda m, index: m.push(m.memo[index]),
    # names, calls, and values stored outside the pickle
    "GLOBAL": lambda m, names: m.push_global(*names.split(" ")),
    "STACK_GLOBAL": lambda m, _: m.push_global(*m.pop(2)),
    "REDUCE NEWOBJ": lambda m, _: m.call(*m.pop(2)),
    "NEWOBJ_EX": lambda m, _: m.call(*m.pop(3)[:2]),
    "INST": lambda m, names: (m.push_global(*names.split(" ")), m.call_class(m.pop(1) + m.pop_mark())),
    "OBJ": lambda m, _: m.call_class(m.pop_mark()),
    "BUILD": lambda m, _: m.build(),
    "PERSID": lambda m, persistent_id: m.push_object(m.persistent_load(persistent_id)),
    "BINPERSID": lambda m, _: m.push_object(m.persistent_load(m.stack.pop())),
}
OPCODES: dict[str, _Step] = {name: step for names, step in _STEPS.items() for name in names.split()}
"""The step for each opcode. Missing, and therefore refused: opcodes that refer to copyreg's extension
registry (EXT1, EXT2, EXT4) and to buffers stored outside the pickle (NEXT_BUFFER, READONLY_BUFFER)."""
