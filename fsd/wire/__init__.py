"""Messages between client and server: framing, codecs, bodies. No I/O in here."""
