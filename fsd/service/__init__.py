"""The rules of the server: commits, content, journals, tokens, sessions, the feed. No HTTP in here."""
