"""Content kept on the local disk, verified when read; losing it loses nothing."""
