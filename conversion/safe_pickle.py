"""Reads pickles of strangers without running anything of theirs: names in them lead to a given table only, where nothing does anything.

The limits keep damaged and malicious ones cheap: bytes, the opcodes that plain data needs, and keys that can be hashed without recursion.
"""

import io
import pickle
import pickletools

import torch

from ..common.errors import UserError
from .stored import StoredTensor


# Bytes of a pickle. That of a NeoBERT's weights has 30 KB, that of FSDP on 256 processes some 30 MB.
LIMIT = 32_000_000
# What protocols 2 and later write for plain data. Those of protocol 0 (whose memo has keys of any length) and buffers are left out.
_OPCODES = set(
    """PROTO FRAME STOP MARK POP POP_MARK NONE NEWTRUE NEWFALSE BININT BININT1 BININT2 LONG1 LONG4 BINFLOAT
    SHORT_BINSTRING BINSTRING SHORT_BINBYTES BINBYTES BINBYTES8 SHORT_BINUNICODE BINUNICODE BINUNICODE8
    EMPTY_TUPLE TUPLE TUPLE1 TUPLE2 TUPLE3 EMPTY_LIST APPEND APPENDS EMPTY_DICT SETITEM SETITEMS EMPTY_SET ADDITEMS FROZENSET
    GLOBAL STACK_GLOBAL REDUCE NEWOBJ BUILD BINPERSID BINGET LONG_BINGET BINPUT LONG_BINPUT MEMOIZE""".split()
)


class StandIn:
    """Takes the place of an object: keeps what it was made with, does nothing.

    Attributes:
        args: arguments of its class.
        fields: attributes that the pickle gives it.
    """

    def __init__(self, *args):
        self.args, self.fields, self.state = args, {}, None


def stand_ins(*paths):
    """{path: class of its own name} for classes that may occur and say nothing that is needed."""
    return {path: type(path.rpartition(".")[2], (StandIn,), {}) for path in paths}


def ordered_dict(*args):
    """Takes the place of collections.OrderedDict."""
    mapping = {}
    for key, value in args[0] if args else ():
        _set_item(mapping, key, value)
    return mapping


def _set_item(mapping, key, value):
    # Hashing a tuple of tuples of tuples ... ends the process; long integers can be chosen so that all have one hash.
    if not (isinstance(key, (str, type(None), torch.dtype, StandIn, StoredTensor)) or (isinstance(key, int) and abs(key) < 1 << 31)):
        raise pickle.UnpicklingError("a mapping with a key that is not plain")
    if isinstance(mapping, dict):
        mapping[key] = value
    elif not isinstance(mapping, StandIn):
        raise pickle.UnpicklingError("an item is set in what is not a mapping")


class SafeUnpickler(pickle._Unpickler):
    """The unpickler in Python, whose steps can be restricted one by one.

    Args:
        file: what to read from.
        names: {"module.name": a subclass of StandIn, a plain value, or a function that the pickle may call}.
        where: the file, for messages.
        persistent_load: function of what the pickle says about an object outside of it; None refuses these.
    Raises:
        UserError: a name that is not in the table.
        Exception: anything, for a damaged pickle.
    """

    dispatch = {code: step for code, step in pickle._Unpickler.dispatch.items() if pickletools.code2op[chr(code)].name in _OPCODES}

    def __init__(self, file, names, where, persistent_load=None):
        super().__init__(file)
        self._names, self._where, self._persistent = names, where, persistent_load
        self._makers = {id(value) for value in names.values() if callable(value)}

    def find_class(self, module, name):
        path = f"{module}.{name}"
        if path not in self._names:
            raise UserError(
                f"{self._where} holds an object of class {path}, which no checkpoint of a NeoBERT needs; nothing of it was run or loaded."
            )
        return self._names[path]

    def persistent_load(self, pid):
        if self._persistent is None:
            raise UserError(f"{self._where} refers to objects outside of it, which are not read.")
        return self._persistent(pid)

    def _made(self, maker, args):
        if id(maker) not in self._makers:
            raise pickle.UnpicklingError("a call of what is not a class")
        return maker(*args)

    def load_global(self):
        lines = [self.readline(), self.readline()]
        if not all(line.endswith(b"\n") for line in lines):
            raise EOFError("it ends in the middle of a name")
        self.append(self.find_class(*(line[:-1].decode() for line in lines)))

    def load_reduce(self):
        args = self.stack.pop()
        self.stack[-1] = self._made(self.stack[-1], args)

    def load_newobj(self):
        args = self.stack.pop()
        self.stack[-1] = self._made(self.stack[-1], args)

    def load_build(self):
        state = self.stack.pop()
        made = self.stack[-1]
        if isinstance(made, StandIn):
            made.state = state
            # Objects with __slots__ have a pair.
            made.fields = next((part for part in (state if isinstance(state, tuple) else (state,)) if isinstance(part, dict)), {})

    def load_setitem(self):
        value, key = self.stack.pop(), self.stack.pop()
        _set_item(self.stack[-1], key, value)

    def load_setitems(self):
        items = self.pop_mark()
        for key, value in zip(items[::2], items[1::2], strict=True):
            _set_item(self.stack[-1], key, value)

    def load_append(self):
        value = self.stack.pop()
        self._extend([value])

    def load_appends(self):
        self._extend(self.pop_mark())

    def _extend(self, values):
        if isinstance(self.stack[-1], list):
            self.stack[-1] += values
        elif not isinstance(self.stack[-1], StandIn):
            raise pickle.UnpicklingError("an item is added to what is not a list")

    # A set says nothing that is needed, and hashes its items.
    def load_empty_set(self):
        self.append(StandIn())

    def load_additems(self):
        self._extend(self.pop_mark())

    def load_frozenset(self):
        self.pop_mark()
        self.append(StandIn())

    for _opcode, _step in (
        (pickle.GLOBAL, load_global),
        (pickle.REDUCE, load_reduce),
        (pickle.NEWOBJ, load_newobj),
        (pickle.BUILD, load_build),
        (pickle.SETITEM, load_setitem),
        (pickle.SETITEMS, load_setitems),
        (pickle.APPEND, load_append),
        (pickle.APPENDS, load_appends),
        (pickle.EMPTY_SET, load_empty_set),
        (pickle.ADDITEMS, load_additems),
        (pickle.FROZENSET, load_frozenset),
    ):
        dispatch[_opcode[0]] = _step


def unpickle(data, names, where, persistent_load=None):
    """The content of one pickle in `data`, bytes or a view of them; arguments and errors as of SafeUnpickler."""
    if len(data) > LIMIT:
        raise UserError(f"{where} describes its content in {len(data):,} bytes, which is too many for a checkpoint of a NeoBERT.")
    return SafeUnpickler(io.BytesIO(data), names, where, persistent_load).load()
