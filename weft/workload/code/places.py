"""Places of variables: mappings by name, which read and write the variables themselves, past their owners' methods."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterator, Mapping, MutableMapping
from types import BuiltinFunctionType, CellType, FunctionType, MemberDescriptorType, MethodType, ModuleType
from typing import Any

from weft.workload.code.functions import contents_of

Variables = MutableMapping[str, Any]
Place = tuple[int, str]  # the id of what has a variable, and its name there

CODE = (FunctionType, MethodType, staticmethod, classmethod, property)
NEVER_PLAIN = (*CODE, BuiltinFunctionType, ModuleType, type)
PARTED = (OrderedDict, dict, list, set, deque)


def parts_within(value: Any) -> Iterator[Any]:
    """Of a container. A class of the user's may refuse len() or be gone through in another way (e3nn's Irreps)."""
    match value:
        case dict():
            return iter(OrderedDict.values(value) if isinstance(value, OrderedDict) else dict.values(value))
        case list():
            return list.__iter__(value)
        case tuple():
            return tuple.__iter__(value)
        case set():
            return set.__iter__(value)
        case deque():
            return deque.__iter__(value)
    return iter(())


def place_of(variables: Mapping[str, Any], key: str) -> Place:
    """The same for each function that refers to it. variables: some that were found, or an object's own."""
    match variables:
        case Named():
            return id(variables._namespace), key
        case Cells():
            return id(variables._cells[key]), ""
        case Arguments():
            return id(variables[key]), ""
        case OfClass():
            return id(variables._kind), key
        case Slots() | ByKey() | AllParts():
            return id(variables._value), "" if isinstance(variables, AllParts) else key
    return id(variables), key


class Arguments(dict[str, Any]):
    """Made anew by each search: what an argument is stands for its place."""


class Named(MutableMapping[str, Any]):
    """Of a namespace, what is asked for by name, without its code."""

    def __init__(self, namespace: dict[str, Any]) -> None:
        self.names: set[str] = set()
        self._namespace = namespace
        self._code = {key for key, each in namespace.items() if isinstance(each, NEVER_PLAIN)}

    def __getitem__(self, key: str) -> Any:
        return self._namespace[key]

    def __setitem__(self, key: str, value: Any) -> None:
        self._namespace[key] = value

    def __delitem__(self, key: str) -> None:
        del self._namespace[key]

    def __iter__(self) -> Iterator[str]:
        return iter((self.names & self._namespace.keys()) - self._code)

    def __len__(self) -> int:
        return sum(1 for _ in self)


class Cells(MutableMapping[str, Any]):
    """What is in variables around a function."""

    def __init__(self, cells: dict[str, CellType]) -> None:
        self._cells = cells

    def __getitem__(self, key: str) -> Any:
        for content in contents_of(self._cells[key]):
            return content
        raise KeyError(key)

    def __setitem__(self, key: str, value: Any) -> None:
        self._cells[key].cell_contents = value

    def __delitem__(self, key: str) -> None:
        del self._cells[key].cell_contents

    def __iter__(self) -> Iterator[str]:
        return (key for key, cell in self._cells.items() if contents_of(cell))

    def __len__(self) -> int:
        return sum(1 for _ in self)


class Slots(MutableMapping[str, Any]):
    """What is in an object's slots."""

    def __init__(self, value: Any, slots: Mapping[str, MemberDescriptorType]) -> None:
        self._value, self._slots = value, slots

    @classmethod
    def of(cls, value: Any) -> Slots | None:
        """None of an object that has none."""
        kinds = [kind for kind in reversed(type(value).__mro__) if "__slots__" in vars(kind)]
        own = {
            key: each for kind in kinds for key, each in vars(kind).items() if isinstance(each, MemberDescriptorType)
        }
        return cls(value, own) if own else None

    def __getitem__(self, key: str) -> Any:
        try:
            return self._slots[key].__get__(self._value)
        except AttributeError:  # nothing is in it
            raise KeyError(key) from None

    def __setitem__(self, key: str, value: Any) -> None:
        self._slots[key].__set__(self._value, value)

    def __delitem__(self, key: str) -> None:
        self._slots[key].__delete__(self._value)

    def __iter__(self) -> Iterator[str]:
        return (key for key in self._slots if key in self)

    def __len__(self) -> int:
        return sum(1 for _ in self)


class ByKey(MutableMapping[str, Any]):
    """What is in a dictionary of a class of the user's (`config.loss.weight`), past its methods."""

    def __init__(self, value: dict[str, Any]) -> None:
        self._value = value

    def __getitem__(self, key: str) -> Any:
        return dict.__getitem__(self._value, key)

    def __setitem__(self, key: str, value: Any) -> None:
        dict.__setitem__(self._value, key, value)

    def __delitem__(self, key: str) -> None:
        dict.__delitem__(self._value, key)

    def __iter__(self) -> Iterator[str]:
        return (key for key in dict.__iter__(self._value) if type(key) is str)

    def __len__(self) -> int:
        return sum(1 for _ in self)


class AllParts(MutableMapping[str, Any]):
    """One part: what is in an object that is a container of a class of the user's, as a plain one, past its methods."""

    def __init__(self, value: Any) -> None:
        self._value = value
        self._kind: Any = next(kind for kind in PARTED if isinstance(value, kind))

    def __getitem__(self, key: str) -> Any:
        if key != "all":
            raise KeyError(key)
        if isinstance(self._value, deque):
            return deque(deque.__iter__(self._value), self._value.maxlen)
        return self._kind((self._kind.items if issubclass(self._kind, dict) else self._kind.__iter__)(self._value))

    def __setitem__(self, key: str, value: Any) -> None:
        self._kind.clear(self._value)
        (self._kind.extend if self._kind in (list, deque) else self._kind.update)(self._value, value)

    def __delitem__(self, key: str) -> None:
        self._kind.clear(self._value)

    def __iter__(self) -> Iterator[str]:
        return iter(("all",))

    def __len__(self) -> int:
        return 1


class OfClass(MutableMapping[str, Any]):
    """Those of a class's attributes that are no code."""

    def __init__(self, kind: type) -> None:
        self._kind = kind
        self._names = set(self._plain())  # later on something may stand in their places that watches them

    def __getitem__(self, key: str) -> Any:
        return vars(self._kind)[key]

    def __setitem__(self, key: str, value: Any) -> None:
        setattr(self._kind, key, value)

    def __delitem__(self, key: str) -> None:
        delattr(self._kind, key)

    def __iter__(self) -> Iterator[str]:
        return iter({*self._plain(), *(self._names & vars(self._kind).keys())})

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def _plain(self) -> list[str]:
        own = vars(self._kind).items()
        return [name for name, each in own if name[:2] != "__" and not hasattr(type(each), "__get__")]
