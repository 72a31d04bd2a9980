"""The mounted filesystem: namespace, content, log, flush, recovery. No FUSE and no HTTP in here."""
