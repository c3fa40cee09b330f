"""Reads pickles without executing them: an interpreter of pickle's opcodes that builds plain data and nothing else.

Python's own unpickler imports what a pickle names and calls it, so a pickle is a program. Here dictionaries, lists,
strings and numbers are built (the dictionaries of `collections` as plain ones), and every class or function stays a
name: a call is recorded as a `PickledObject`. Nothing is imported, nothing is called and no attribute of any object is
set, and no setting changes that.

As a second line of defence the caller lists the names that it expects; any other name refuses the whole file, and the
message shows the name.

The opcodes and their arguments are parsed by the standard library's disassembler, `pickletools`, which executes
nothing either. Why not `torch.load(weights_only=True)`: see docs/design.md.
"""

from __future__ import annotations

import pickletools
from collections.abc import Callable
from dataclasses import dataclass
from typing import IO, Any

from transformer_xl.config import UserError

IsAllowed = Callable[[str], bool]
"""Whether a pickle may name this class or function, such as `argparse.Namespace`."""

_PYTHON_2_MODULES = {"__builtin__": "builtins", "copy_reg": "copyreg"}
_DICTIONARIES = frozenset({"collections.OrderedDict", "collections.Counter", "builtins.dict"})
_ALWAYS_ALLOWED = _DICTIONARIES | {
    "collections.defaultdict", "_codecs.encode", "copyreg._reconstructor",
    *(f"builtins.{name}" for name in ("list", "set", "frozenset", "tuple", "int", "long", "float", "bool", "str",
                                      "unicode", "bytes", "bytearray", "object")),
}  # fmt: skip
"""Names with which pickle itself writes plain values."""

_MAX_INT_BITS = 8192  # converting a longer integer to decimal digits takes quadratic time
_MAX_KEY = 2**61 - 2  # integers above it can share one hash, and a dictionary of such keys takes hours
_MAX_OBJECTS = 250_000  # each takes far more memory than the bytes of the file that ask for it


@dataclass(frozen=True)
class GlobalName:
    """A class or function that a pickle names; it is not looked up."""

    path: str


@dataclass(eq=False)
class PickledObject:
    """A call that a pickle asked for, recorded instead of executed."""

    name: str
    """Of the class or function."""
    arguments: tuple[Any, ...] = ()
    state: Any = None
    """What the object would get afterwards; for most classes its attributes."""

    @property
    def attributes(self) -> dict[str, Any]:
        """The attributes of the object; empty where its state is something else."""
        state = self.state[0] if isinstance(self.state, tuple) and len(self.state) == 2 else self.state
        return state if isinstance(state, dict) else {}


def read_pickle(
    file: IO[bytes], is_allowed: IsAllowed, source: str, persistent_load: Callable[[Any], Any] | None = None
) -> Any:
    """Read one pickle; the file is left at the byte behind it.

    Args:
        file: must not allocate more than it has when asked for more, as io.BytesIO and mmap do not.
        is_allowed: names that may occur, beside those with which pickle writes plain values.
        source: the file's name, for messages.
        persistent_load: turns the id of something stored outside the pickle into a value; none: there are no such ids.

    Raises:
        UserError: a name is not allowed, or this is not a complete pickle.
    """
    machine = _Machine(is_allowed, source, persistent_load)
    try:
        for opcode, argument, position in pickletools.genops(file):
            machine.position = position or 0
            OPCODES[opcode.name](machine, argument)
        return machine.stack.pop()
    except UserError:
        raise
    except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, MemoryError, RecursionError):
        raise UserError(f"{source} is damaged, or not a pickle (at byte {machine.position:,}); get it again") from None


class _Machine:
    """The state of pickle's virtual machine: the stack, the stacks below each open mark, and the memo."""

    def __init__(self, is_allowed: IsAllowed, source: str, persistent_load: Callable[[Any], Any] | None) -> None:
        self._is_allowed, self._source, self._persistent_load = is_allowed, source, persistent_load
        self.stack: list[Any] = []
        self.below_marks: list[list[Any]] = []
        self.memo: dict[int, Any] = {}
        self.position = self.num_copied = self.num_objects = 0

    def push(self, value: Any) -> None:
        if isinstance(value, int) and value.bit_length() > _MAX_INT_BITS:
            raise ValueError
        self.stack.append(value)

    def push_bytes_or_text(self, value: str) -> None:
        """Push a string of Python 2: bytes, most often UTF-8."""
        content = value.encode("latin-1")
        try:
            self.push(content.decode("utf-8"))
        except UnicodeDecodeError:
            self.push(content)

    def mark(self) -> None:
        self.below_marks.append(self.stack)
        self.stack = []

    def pop_mark(self) -> list[Any]:
        """Everything above the last mark."""
        values, self.stack = self.stack, self.below_marks.pop()
        return values

    def pop(self, count: int) -> list[Any]:
        return [self.stack.pop() for _ in range(count)][::-1]

    def remember(self, index: int) -> None:
        self.memo[index] = self.stack[-1]

    def push_global(self, module: Any, name: Any) -> None:
        if not (isinstance(module, str) and isinstance(name, str)):
            raise ValueError
        path = f"{_PYTHON_2_MODULES.get(module, module)}.{name}"
        if path not in _ALWAYS_ALLOWED and not self._is_allowed(path):
            raise UserError(
                f"{self._source} names {ascii(path)[1:-1][:120]}, which has no place in a checkpoint or vocabulary; it "
                "may be malicious: nothing of it was executed, and it is not read"
            )
        self.push(GlobalName(path))

    def call(self, called: Any, arguments: Any) -> None:
        """Push the plain value or the record of a call."""
        if not (isinstance(called, GlobalName) and isinstance(arguments, tuple)):
            raise ValueError
        if called.path in _DICTIONARIES:
            self._count_copied(sum(map(len, arguments)))
            (given,) = arguments or ([],)
            pairs = given.items() if isinstance(given, dict) else given
            self.push_dictionary([part for key, value in pairs for part in (key, value)])
        elif called.path == "_codecs.encode":  # bytes, in protocols 0 to 2
            self._count_copied(len(arguments[0]))
            self.push(arguments[0].encode("latin-1"))
        elif called.path == "collections.defaultdict":
            self.push({})
        elif called.path == "builtins.bytes" and not arguments:
            self.push(b"")
        else:
            if called.path == "copyreg._reconstructor":
                called, arguments = arguments[0], ()
            self.num_objects += 1
            if self.num_objects > _MAX_OBJECTS:
                raise ValueError
            self.push(PickledObject(called.path, arguments))

    def call_class(self, values: list[Any]) -> None:
        self.call(values[0], tuple(values[1:]))

    def _count_copied(self, length: int) -> None:
        self.num_copied += length
        if self.num_copied > self.position:  # one value copied again and again: a small file that fills the memory
            raise ValueError

    def build(self) -> None:
        target, state = self.pop(2)
        if isinstance(target, PickledObject):
            target.state = state
        elif not isinstance(target, dict):  # the attributes of a dictionary are not needed
            raise ValueError
        self.push(target)

    def extend(self, values: list[Any]) -> None:
        target = self.stack[-1]
        if isinstance(target, list):
            target.extend(values)
        elif not isinstance(target, PickledObject):  # the entries of other classes are not needed
            raise ValueError

    def set_items(self, values: list[Any]) -> None:
        target, keys = self.stack[-1], values[::2]
        # Hashing a tuple goes as deep as the file likes, beyond the end of the C stack.
        if not all(isinstance(key, str | bytes | int | float | None) for key in keys):
            raise ValueError
        if any(isinstance(key, int) and abs(key) > _MAX_KEY for key in keys):
            raise ValueError
        pairs = zip(keys, values[1::2], strict=True)
        if isinstance(target, dict):
            target.update(pairs)
        elif not isinstance(target, PickledObject):
            raise ValueError

    def push_dictionary(self, values: list[Any]) -> None:
        self.push({})
        self.set_items(values)

    def load_persistent(self, label: Any) -> None:
        if self._persistent_load is None:
            raise ValueError
        self.push(self._persistent_load(label))


_Step = Callable[[_Machine, Any], object]

_STEPS: dict[str, _Step] = {
    "PROTO FRAME STOP": lambda m, _: None,
    # plain values
    "INT BININT BININT1 BININT2 LONG LONG1 LONG4 FLOAT BINFLOAT STRING UNICODE BINUNICODE SHORT_BINUNICODE BINUNICODE8 "
    "BINBYTES SHORT_BINBYTES BINBYTES8 BYTEARRAY8": _Machine.push,
    "BINSTRING SHORT_BINSTRING": _Machine.push_bytes_or_text,
    "NONE": lambda m, _: m.push(None),
    "NEWTRUE": lambda m, _: m.push(True),
    "NEWFALSE": lambda m, _: m.push(False),
    "EMPTY_TUPLE": lambda m, _: m.push(()),
    "EMPTY_DICT": lambda m, _: m.push({}),
    "EMPTY_LIST EMPTY_SET": lambda m, _: m.push([]),  # members of a set would have to be hashed
    # containers
    "TUPLE": lambda m, _: m.push(tuple(m.pop_mark())),
    "TUPLE1": lambda m, _: m.push(tuple(m.pop(1))),
    "TUPLE2": lambda m, _: m.push(tuple(m.pop(2))),
    "TUPLE3": lambda m, _: m.push(tuple(m.pop(3))),
    "LIST FROZENSET": lambda m, _: m.push(m.pop_mark()),
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
    "PUT BINPUT LONG_BINPUT": _Machine.remember,
    "MEMOIZE": lambda m, _: m.remember(len(m.memo)),
    "GET BINGET LONG_BINGET": lambda m, index: m.push(m.memo[index]),
    # names, calls, and what is stored elsewhere
    "GLOBAL": lambda m, names: m.push_global(*names.split(" ")),
    "STACK_GLOBAL": lambda m, _: m.push_global(*m.pop(2)),
    "REDUCE NEWOBJ": lambda m, _: m.call(*m.pop(2)),
    "NEWOBJ_EX": lambda m, _: m.call(*m.pop(3)[:2]),
    "INST": lambda m, names: (m.push_global(*names.split(" ")), m.call_class(m.pop(1) + m.pop_mark())),
    "OBJ": lambda m, _: m.call_class(m.pop_mark()),
    "BUILD": lambda m, _: m.build(),
    "PERSID": _Machine.load_persistent,
    "BINPERSID": lambda m, _: m.load_persistent(*m.pop(1)),
}
OPCODES: dict[str, _Step] = {name: step for names, step in _STEPS.items() for name in names.split()}
"""What each opcode does. Missing, and therefore refused: the extension registry and buffers out of band."""
