"""The server's bytes: objects in a directory or in an S3-compatible store, behind one Protocol."""
