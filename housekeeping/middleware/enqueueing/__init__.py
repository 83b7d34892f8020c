"""The one path of messages into queues, for single messages and for batches.

Start with `path`. It calls the middleware's hooks and writes messages and deduplication keys. `redis_queues` writes
both by one script if they are in the same Redis. `many` is the public `housekeeping.enqueue_many`.
"""
