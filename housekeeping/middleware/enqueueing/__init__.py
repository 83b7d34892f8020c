"""The one path of messages into queues, for single messages and for batches.

Start with `path`: hooks of the middleware, then the message and its deduplication key, then the hooks after it.
`redis_queues` writes message and key in one script where both are in the same Redis. `many` is the public
`housekeeping.enqueue_many`.
"""
