"""`fsd.model.plain` beside the original: what is made of one text by both must behave alike."""

from __future__ import annotations

import copy
import dataclasses
import subprocess
import sys
from typing import Any

import pytest

from fsd.model import plain

TEXT = '''
class Shown:
    """What it is."""

    name: str = field(repr=False)
    size: int
    tags: list[str] = field(default_factory=list)
    note: str = ""
    seen: int = field(default=3, compare=False)
    other: object = None

    @property
    def twice(self) -> int:
        return self.size * 2
'''
LATER = (
    TEXT
    + """
    def __post_init__(self) -> None:
        self.tags.append(self.name)

    def __repr__(self) -> str:
        return "its own"
"""
)
EMPTY = '''
class Shown:
    """Nothing."""
'''
FORMS = [
    {"frozen": frozen, "slots": slots, "eq": eq}
    for frozen in (True, False)
    for slots in (True, False)
    for eq in (True, False)
]


def made(by: Any, text: str, form: dict[str, bool]) -> Any:
    space = {"field": by.field, "dataclass": by.dataclass, "form": form, "__name__": __name__}
    code = "from __future__ import annotations\n" + text.replace("\nclass", "\n@dataclass(**form)\nclass", 1)
    exec(code, space)
    return space["Shown"]


def outcome(call: Any) -> object:
    try:
        return call()
    except (TypeError, AttributeError) as exc:
        return type(exc)


def asked(by: Any, text: str, form: dict[str, bool]) -> dict[str, object]:
    """Everything that is asked of such a class, as what it answers."""
    kind = made(by, text, form)
    if text == EMPTY:
        return {"same": (kind() == kind()), "shown": repr(kind()), "match": kind.__match_args__}
    one, like, another = kind("a", 1), kind(name="a", size=1, seen=7), kind("a", 2, ["t"], "n", 4, one_too())
    return {
        "doc": kind.__doc__,
        "name": (kind.__name__, kind.__qualname__, kind.__module__),
        "match": kind.__match_args__,
        "shown": (repr(one), repr(another)),
        "values": (another.name, another.tags, another.note, another.seen, another.twice),
        "own list": one.tags is not like.tags,
        "equal": (one == like, one == another, one == 5, one != like),
        "hash": outcome(lambda: hash(kind("a", 1, ())) == hash(kind("a", 1, (), seen=9))),  # type: ignore[arg-type]
        "set": outcome(lambda: setattr(one, "size", 5)),
        "deleted": outcome(lambda: delattr(like, "size")),
        "room for more": hasattr(one, "__dict__"),
        "too few": outcome(lambda: kind("a")),
        "unknown": outcome(lambda: kind("a", 1, unknown=1)),
        "fields": [(f.name, f.type, f.repr, f.compare, f.init) for f in dataclasses.fields(kind)],
        "replaced": dataclasses.replace(another, size=9).twice,
        "as a dict": dataclasses.asdict(another),
        "is one": dataclasses.is_dataclass(kind),
    }


def one_too() -> object:
    return "x"


@pytest.mark.parametrize("form", FORMS, ids=lambda form: " ".join(n for n, v in form.items() if v) or "none")
@pytest.mark.parametrize("text", [TEXT, LATER, EMPTY], ids=["plain", "later", "empty"])
def test_a_class_behaves_as_one_of_the_original(text: str, form: dict[str, bool]) -> None:
    assert asked(plain, text, form) == asked(dataclasses, text, form)


def test_replace() -> None:
    kind = made(plain, TEXT, {"frozen": True, "slots": True})
    one = kind("a", 1, ["t"], seen=8)
    other = plain.replace(one, size=2)
    assert (other.name, other.size, other.tags, other.seen) == ("a", 2, ["t"], 8)
    assert copy.copy(made(plain, TEXT, {"slots": True})("a", 1)).name == "a"
    with pytest.raises(TypeError):
        plain.replace(one, unknown=1)


def test_neither_commands_nor_supervisors_nor_daemons_load_the_original() -> None:
    for program in (
        "import fsd.cli.main, fsd.cli.do_mount, fsd.cli.do_files, fsd.kernel.supervisor",
        "from fsd.kernel import supervisor; supervisor.load_daemon()",
    ):
        look = f"import sys; {program}; print({{'dataclasses', 'inspect'}} & set(sys.modules))"
        done = subprocess.run([sys.executable, "-c", look], capture_output=True, text=True, timeout=60)
        assert done.stdout == "set()\n", done.stderr
