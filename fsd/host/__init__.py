"""The machine behind one seam: clock, randomness, durable files, crash points.

Nothing above this package calls `time`, `os.urandom` or `os.fsync` itself; options carry a `Host` down, so a
test can move time, drop unsynced bytes and stop the process at any named durable step.
"""
