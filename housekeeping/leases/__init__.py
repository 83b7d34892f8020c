"""Exclusive leases: Redis or PostgreSQL decides who may begin, and a fencing token in PostgreSQL who may commit.

Start with `lease`: the public `ExclusiveLease`, its fencing tokens, and the lease of the current message. `renewal`
chooses the store, keeps leases in Redis, and renews them in the background.
"""
