"""fsd: a directory that survives the sandbox it is used in."""

__version__ = "0.1.0"
