"""Deduplication: at most one live message for the same work.

Start with `middleware`, the hooks in the life of a message. `options` checks what an actor asks for. `steps` chooses
what happens to a message's key when the message is enqueued, `ending` when it ends. `keys` does it in Redis, by the Lua
`scripts`. `listing` shows keys to an operator.
"""
