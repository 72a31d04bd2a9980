from collections.abc import Sequence
from typing import Final

FAST: Final[bool]

def many(messages: Sequence[bytes | bytearray | memoryview], /) -> list[bytes]: ...
