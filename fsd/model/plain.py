"""`dataclasses`, made in a sixth of the time, as far as this package uses it.

The original writes and compiles up to eight functions for each class, and loads `inspect` to do it: of what
commands and daemons take to load that was more than a fifth. Here `__init__` alone is compiled, and the rest
is the same for all. What reads code (mypy) is told that this is the original; so it is for what the original
offers for its classes (`dataclasses.fields`, `replace`, …), which find here what they look for.

Not here: keyword-only and class variables, fields of a base class, order.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dataclasses import dataclass as dataclass
    from dataclasses import field as field
    from dataclasses import replace as replace
else:
    from collections.abc import Callable
    from operator import attrgetter

    _NONE = object()

    class _Field:
        __slots__ = ("compare", "default", "default_factory", "name", "repr")

        def __init__(self, default: Any, default_factory: Any, repr: bool, compare: bool) -> None:
            self.name = ""
            self.default = default
            self.default_factory = default_factory
            self.repr = repr
            self.compare = compare

    def field(
        *, default: Any = _NONE, default_factory: Any = _NONE, repr: bool = True, compare: bool = True
    ) -> Any:
        return _Field(default, default_factory, repr, compare)

    def dataclass(*, frozen: bool = False, eq: bool = True, slots: bool = False) -> Callable[[type], type]:
        return lambda cls: _made(cls, frozen, eq, slots)

    def replace(one: Any, /, **changes: Any) -> Any:
        kept = {name: getattr(one, name) for name in one.__match_args__ if name not in changes}
        return type(one)(**kept, **changes)

    def _made(cls: type, frozen: bool, eq: bool, slots: bool) -> type:
        fields = []
        own = dict(cls.__dict__)
        for name in own.get("__annotations__", ()):
            default = own.pop(name, _NONE)
            found = default if isinstance(default, _Field) else _Field(default, _NONE, True, True)
            found.name = name
            fields.append(found)
        given = {
            "__init__": _init(cls, fields, frozen),
            "__repr__": _repr(fields),
            "__match_args__": tuple(one.name for one in fields),
            "__dataclass_fields__": _Original(fields),
        }
        if own.get("__hash__", _NONE) is None:  # Python's own, where there is an `__eq__`
            del own["__hash__"]
        if eq:
            values = _getter(fields)
            given["__eq__"] = lambda one, other: (
                values(one) == values(other) if other.__class__ is one.__class__ else NotImplemented
            )
            given["__hash__"] = (lambda one: hash(values(one))) if frozen else None
        if frozen:
            given["__setattr__"] = given["__delattr__"] = _refuse
        if slots:
            made = {n: v for n, v in own.items() if n not in ("__dict__", "__weakref__")}
            made["__slots__"] = given["__match_args__"]
            new = type(cls)(cls.__name__, cls.__bases__, {**given, **made})
            new.__qualname__ = cls.__qualname__
            return new
        for one in fields:
            if isinstance(cls.__dict__.get(one.name), _Field):
                delattr(cls, one.name)
        for name, value in given.items():
            if name not in own:
                setattr(cls, name, value)
        return cls

    def _init(cls: type, fields: list[_Field], frozen: bool) -> Callable[..., None]:
        known = {"_none": _NONE, "_set": object.__setattr__}
        words, lines = ["self"], []
        for one in fields:
            word, value = one.name, one.name
            if one.default_factory is not _NONE:
                known["_factory_" + word] = one.default_factory
                value = f"_factory_{word}() if {word} is _none else {word}"
                word += "=_none"
            elif one.default is not _NONE:
                known["_default_" + word] = one.default
                word += "=_default_" + word
            words.append(word)
            lines.append(f" _set(self, {one.name!r}, {value})" if frozen else f" self.{one.name} = {value}")
        if hasattr(cls, "__post_init__"):
            lines.append(" self.__post_init__()")
        exec(f"def __init__({', '.join(words)}):\n" + "\n".join(lines or [" pass"]), known)
        made = known["__init__"]
        made.__qualname__ = f"{cls.__qualname__}.__init__"
        return made

    def _getter(fields: list[_Field]) -> Callable[[object], object]:
        names = [one.name for one in fields if one.compare]
        return attrgetter(*names) if names else lambda one: ()

    def _repr(fields: list[_Field]) -> Callable[[object], str]:
        names = [one.name for one in fields if one.repr]

        def shown(one: object) -> str:
            told = ", ".join(f"{name}={getattr(one, name)!r}" for name in names)
            return f"{one.__class__.__qualname__}({told})"

        return shown

    def _refuse(one: object, name: str, value: object = None) -> None:
        from dataclasses import FrozenInstanceError

        raise FrozenInstanceError(f"cannot assign to field {name!r}")

    class _Original:
        """The fields as the original makes them, for who asks with its functions."""

        def __init__(self, fields: list[_Field]) -> None:
            self._fields = fields
            self._made = None

        def __get__(self, one: object, cls: type) -> dict[str, Any]:
            if self._made is None:
                import dataclasses

                def told(one: _Field) -> tuple[str, Any, Any]:
                    more = {"repr": one.repr, "compare": one.compare}
                    for name in ("default", "default_factory"):
                        if getattr(one, name) is not _NONE:
                            more[name] = getattr(one, name)
                    return one.name, cls.__annotations__[one.name], dataclasses.field(**more)

                like = dataclasses.make_dataclass(cls.__name__, map(told, self._fields))
                self._made = like.__dataclass_fields__
            return self._made
