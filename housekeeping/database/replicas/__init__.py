"""Reads from replicas: a message reads only from one that has replayed the WAL position that it carries.

Start with `routing`, which has the public `read_database`. `replica` chooses a replica and reads from it.
`wal_position` reads the position when a message is sent.
"""
