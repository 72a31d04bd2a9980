"""The server's facts: one small `Database` interface over SQLite and PostgreSQL.

`database` holds the Protocols and `open_database`, `schema` the numbered migrations, `sql` the pieces of SQL
text both engines take, `group` the group commit, `sqlite` and `postgresql` the engines.
"""
