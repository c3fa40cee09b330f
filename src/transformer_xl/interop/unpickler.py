"""Reads pickles without running anything: an interpreter of pickle's opcodes that can only write things down.

Python's own unpickler imports what a pickle names and calls it, so a pickle is a program. Here a name stays a name.
Where a pickle wants something called, the call is recorded: `Record("mem_transformer.MemTransformerLM", ...)`. Nothing
is imported, nothing is called, no attribute of any object is set, and no setting changes that. Dictionaries, lists,
texts and numbers are what they are; the dictionaries of `collections` become plain ones.

As a second fence, a name must be one that the caller expects; any other refuses the whole file, and the message says
the name. So a file that is meant to do harm is noticed, not only disarmed.

Sources: the opcodes are described in Python's pickletools, whose tables the tests compare with this one.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from transformer_xl.config import UserError
from transformer_xl.interop.plain_keys import Damaged, check_key, dictionary_of

Admits = Callable[[str], bool]
"""Whether a pickle may name this, such as `collections.Counter`."""

PLAIN = frozenset(
    [
        "collections.OrderedDict", "collections.Counter", "collections.defaultdict", "_codecs.encode",
        "copyreg._reconstructor", "copy_reg._reconstructor",
        *(f"{home}.{name}" for home in ("builtins", "__builtin__")
          for name in ("dict", "list", "set", "frozenset", "tuple", "int", "long", "float", "bool", "str", "unicode",
                       "bytes", "bytearray", "object")),
    ]
)  # fmt: skip
"""Names that say no more than how plain values are kept."""

_DICTIONARIES = frozenset({"collections.OrderedDict", "collections.Counter", "builtins.dict", "__builtin__.dict"})


@dataclass(frozen=True)
class Name:
    """A class or function that a pickle names; it is neither looked up nor imported."""

    path: str


@dataclass(eq=False)
class Record:
    """Something a pickle wanted made by a call, written down and not made."""

    name: str
    """Of the class or function."""
    arguments: tuple[Any, ...] = ()
    state: Any = None
    """What it was to be given afterwards, for most objects their attributes."""
    items: dict[Any, Any] = field(default_factory=dict)
    """What was to be put into it by key."""
    entries: list[Any] = field(default_factory=list)
    """What was to be added to it."""

    @property
    def attributes(self) -> dict[str, Any]:
        """The attributes of the object; empty where it kept something else."""
        state = self.state[0] if isinstance(self.state, tuple) and len(self.state) == 2 else self.state
        return state if isinstance(state, dict) else {}


@dataclass(frozen=True)
class Outside:
    """A reference to what is kept beside the pickle, such as the numbers of a tensor."""

    label: Any


def read_pickle(content: memoryview, admits: Admits, source: str) -> tuple[Any, int]:
    """The value of the first pickle in `content`, and where the next thing after it begins.

    Args:
        content: bytes of the file, one dimension of unsigned bytes.
        admits: which names may stand in it, beside those of `PLAIN`.
        source: the file, for messages.

    Raises:
        UserError: a name that is not admitted, or something that is no whole pickle.
    """
    machine = _Machine(content, admits, source)
    try:
        return machine.run(), machine.place
    except (
        Damaged, IndexError, KeyError, TypeError, ValueError, AttributeError, struct.error, OverflowError, MemoryError,
        RecursionError,
    ) as error:  # fmt: skip
        if isinstance(error, UserError):
            raise
        raise UserError(f"{source} is damaged, or no pickle (at byte {machine.place:,}); get it again") from None


_MARK = object()
_LARGEST_NUMBER = 1024  # bytes of a whole number; turning a long one into digits takes longer than its length
_MOST_RECORDS = 250_000


class _Machine:
    """A stack, a memo, and a way to go on with each opcode."""

    def __init__(self, content: memoryview, admits: Admits, source: str) -> None:
        self.place = 0
        self._content, self._admits, self._source = content, admits, source
        self._stack: list[Any] = []
        self._memo: dict[int, Any] = {}
        self.copied = self._records = 0

    def run(self) -> Any:
        content, opcodes = self._content, OPCODES
        while True:
            code = content[self.place]
            self.place += 1
            if code == 0x2E:  # STOP
                return self._stack.pop()
            opcodes[code](self)

    def push(self, value: Any) -> None:
        self._stack.append(value)

    def take(self, number: int) -> memoryview:
        """The next bytes."""
        stop = self.place + number
        if number < 0 or stop > len(self._content):
            raise Damaged
        taken = self._content[self.place : stop]
        self.place = stop
        return taken

    def number(self, form: str) -> int:
        return struct.unpack(form, self.take(struct.calcsize(form)))[0]

    def line(self) -> str:
        """The text up to the next line end."""
        start = self.place
        while self.take(1)[0] != 0x0A:
            pass
        return bytes(self._content[start : self.place - 1]).decode("latin-1")

    def marked(self) -> list[Any]:
        """What stands above the last mark, taken off with it."""
        stack = self._stack
        for place in range(len(stack) - 1, -1, -1):
            if stack[place] is _MARK:
                values = stack[place + 1 :]
                del stack[place:]
                return values
        raise Damaged

    def pop(self) -> Any:
        value = self._stack.pop()
        if value is _MARK:
            raise Damaged
        return value

    def drop(self) -> None:
        self._stack.pop()

    def top(self) -> Any:
        value = self._stack[-1]
        if value is _MARK:
            raise Damaged
        return value

    def remember(self, place: int) -> None:
        self._memo[place] = self.top()

    def memoize(self) -> None:
        self.remember(len(self._memo))

    def recall(self, place: int) -> None:
        self.push(self._memo[place])

    def name(self, module: Any, name: Any) -> None:
        if not (isinstance(module, str) and isinstance(name, str)):
            raise Damaged
        path = f"{module}.{name}"
        if path not in PLAIN and not self._admits(path):
            raise UserError(
                f"{self._source} names {_shown(path)}, which has no place in a checkpoint or vocabulary; it may be "
                "meant to do harm: nothing of it was run, and it is not read"
            )
        self.push(Name(path))

    def call(self, called: Any, arguments: Any) -> None:
        """Writes a call down."""
        if isinstance(called, Outside) and isinstance(called.label, tuple) and called.label[:1] == ("module",):
            called = called.label[1]  # a class with its source text, as torch.save used to write them
        if not (isinstance(called, Name) and isinstance(arguments, tuple)):
            raise Damaged
        if called.path in _DICTIONARIES:
            self.copied += sum(map(len, arguments))
            self.push(dictionary_of(arguments))
        elif called.path == "_codecs.encode":  # bytes, as old forms of pickle keep them
            self.copied += len(arguments[0])
            self.push(arguments[0].encode("latin-1"))
        elif called.path == "collections.defaultdict":
            self.push({})
        elif called.path in ("builtins.bytes", "__builtin__.bytes") and not arguments:
            self.push(b"")
        elif called.path in ("copyreg._reconstructor", "copy_reg._reconstructor"):
            self.record(arguments[0].path, ())
        else:
            self.record(called.path, arguments)
        if self.copied > len(self._content):  # the same thing again and again: a small file that fills the memory
            raise Damaged

    def record(self, name: str, arguments: tuple[Any, ...]) -> None:
        """A new record; each takes far more memory than the bytes that ask for it."""
        self._records += 1
        if self._records > _MOST_RECORDS:
            raise Damaged
        self.push(Record(name, arguments))

    def build(self) -> None:
        state, made = self.pop(), self.top()
        if isinstance(made, Record):
            made.state = state
        elif not isinstance(made, dict):  # what a dictionary has beside its items is not wanted
            raise Damaged

    def append(self, values: list[Any]) -> None:
        made = self.top()
        if not isinstance(made, (list, Record)):
            raise Damaged
        (made if isinstance(made, list) else made.entries).extend(values)

    def put_in(self, values: list[Any]) -> None:
        made = self.top()
        if not isinstance(made, (dict, Record)) or len(values) % 2:
            raise Damaged
        for key in values[::2]:
            check_key(key)
        (made if isinstance(made, dict) else made.items).update(zip(values[::2], values[1::2], strict=True))

    def integer(self, content: memoryview) -> int:
        if len(content) > _LARGEST_NUMBER:
            raise Damaged
        return int.from_bytes(content, "little", signed=True)


def _shown(path: str) -> str:
    return ascii(path)[1:-1][:120]


def _text(content: memoryview) -> str:
    return bytes(content).decode("utf-8", "surrogatepass")


def _old_text(content: memoryview) -> str | bytes:
    """A string of Python 2: bytes, most of them text."""
    try:
        return bytes(content).decode("utf-8")
    except UnicodeDecodeError:
        return bytes(content)


def _quoted(machine: _Machine) -> None:
    """A string as Python 2 wrote it in a line, between quotation marks; escapes are refused."""
    line = machine.line()
    if len(line) < 2 or line[0] != line[-1] or line[0] not in "'\"" or "\\" in line:
        raise Damaged
    machine.push(line[1:-1])


def _decimal(machine: _Machine) -> None:
    line = machine.line().removesuffix("L")
    if len(line) > _LARGEST_NUMBER:
        raise Damaged
    machine.push({"00": False, "01": True}[line] if line in ("00", "01") else int(line))


def _dictionary(machine: _Machine) -> None:
    values = machine.marked()
    machine.push({})
    machine.put_in(values)


def _stack_global(machine: _Machine) -> None:
    name, module = machine.pop(), machine.pop()
    machine.name(module, name)


def _reduce(machine: _Machine) -> None:
    arguments, called = machine.pop(), machine.pop()
    machine.call(called, arguments)


def _new_with_keywords(machine: _Machine) -> None:
    _, arguments, called = machine.pop(), machine.pop(), machine.pop()
    machine.call(called, arguments)


def _instance(machine: _Machine) -> None:
    module, name = machine.line(), machine.line()
    arguments = machine.marked()
    machine.name(module, name)
    machine.call(machine.pop(), tuple(arguments))


def _object(machine: _Machine) -> None:
    called, *arguments = machine.marked()
    machine.call(called, tuple(arguments))


def _last(number: int) -> Callable[[_Machine], None]:
    def tuple_of(machine: _Machine) -> None:
        machine.push(tuple(reversed([machine.pop() for _ in range(number)])))

    return tuple_of


Step = Callable[[_Machine], Any]

_STEPS: dict[str, Step] = {
    "\x80": lambda m: m.take(1),  # PROTO
    "\x95": lambda m: m.take(8),  # FRAME
    "(": lambda m: m.push(_MARK),
    "0": lambda m: m.drop(),
    "1": lambda m: m.marked(),  # POP_MARK
    "2": lambda m: m.push(m.top()),  # DUP
    "N": lambda m: m.push(None),
    "\x88": lambda m: m.push(True),
    "\x89": lambda m: m.push(False),
    # numbers
    "I": _decimal,
    "L": _decimal,
    "J": lambda m: m.push(m.number("<i")),
    "K": lambda m: m.push(m.number("<B")),
    "M": lambda m: m.push(m.number("<H")),
    "\x8a": lambda m: m.push(m.integer(m.take(m.number("<B")))),
    "\x8b": lambda m: m.push(m.integer(m.take(m.number("<i")))),
    "F": lambda m: m.push(float(m.line())),
    "G": lambda m: m.push(m.number(">d")),
    # texts and bytes
    "S": _quoted,
    "T": lambda m: m.push(_old_text(m.take(m.number("<i")))),
    "U": lambda m: m.push(_old_text(m.take(m.number("<B")))),
    "V": lambda m: m.push(m.line().encode("latin-1").decode("raw_unicode_escape")),
    "X": lambda m: m.push(_text(m.take(m.number("<I")))),
    "\x8c": lambda m: m.push(_text(m.take(m.number("<B")))),
    "\x8d": lambda m: m.push(_text(m.take(m.number("<Q")))),
    "B": lambda m: m.push(bytes(m.take(m.number("<I")))),
    "C": lambda m: m.push(bytes(m.take(m.number("<B")))),
    "\x8e": lambda m: m.push(bytes(m.take(m.number("<Q")))),
    "\x96": lambda m: m.push(bytes(m.take(m.number("<Q")))),
    # tuples, lists, sets, dictionaries
    ")": lambda m: m.push(()),
    "\x85": _last(1),
    "\x86": _last(2),
    "\x87": _last(3),
    "t": lambda m: m.push(tuple(m.marked())),
    "]": lambda m: m.push([]),
    "l": lambda m: m.push(m.marked()),
    "a": lambda m: m.append([m.pop()]),
    "e": lambda m: m.append(m.marked()),
    "\x8f": lambda m: m.push([]),  # EMPTY_SET
    "\x90": lambda m: m.append(m.marked()),  # ADDITEMS
    "\x91": lambda m: m.push(m.marked()),  # FROZENSET
    "}": lambda m: m.push({}),
    "d": _dictionary,
    "s": lambda m: m.put_in([m.pop(), m.pop()][::-1]),
    "u": lambda m: m.put_in(m.marked()),
    # what was seen before
    "p": lambda m: m.remember(int(m.line())),
    "q": lambda m: m.remember(m.number("<B")),
    "r": lambda m: m.remember(m.number("<I")),
    "\x94": lambda m: m.memoize(),
    "g": lambda m: m.recall(int(m.line())),
    "h": lambda m: m.recall(m.number("<B")),
    "j": lambda m: m.recall(m.number("<I")),
    # names, calls, what stands elsewhere
    "c": lambda m: m.name(m.line(), m.line()),
    "\x93": _stack_global,
    "R": _reduce,
    "\x81": _reduce,  # NEWOBJ
    "\x92": _new_with_keywords,
    "i": _instance,
    "o": _object,
    "b": lambda m: m.build(),
    "P": lambda m: m.push(Outside(m.line())),
    "Q": lambda m: m.push(Outside(m.pop())),
}
OPCODES = {ord(code): step for code, step in _STEPS.items()}
"""What each opcode does; those for extension codes and for buffers out of band are not there."""
