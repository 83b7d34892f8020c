"""Enqueueing: the only path by which messages reach their queues, alone or in bulk.

Start with `path`. It calls the middleware's hooks and writes messages and deduplication keys. `redis_queues` writes
both by one of the Lua `scripts` if they are in the same Redis. `many` is the public `housekeeping.enqueue_many`.
"""
