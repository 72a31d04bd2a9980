from typing import Final

FAST: Final[bool]

def crc32(data: bytes | memoryview, before: int = 0, /) -> int: ...
