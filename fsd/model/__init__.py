"""Ids, attributes, operations, errors and limits: the words both sides share. No I/O in here."""
