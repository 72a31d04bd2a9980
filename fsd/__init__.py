"""fsd: a directory that survives the sandbox it is used in."""
