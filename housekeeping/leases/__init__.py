"""Exclusive leases: Redis decides who may begin, and a fencing token in PostgreSQL decides who may commit.

Start with `lease`, the public `ExclusiveLease`. `store` keeps leases in Redis, `renewal` renews them in the background,
`fencing` issues and checks the fencing tokens (epochs), `holder_epoch` decides when a holder gets one, and
`lease_token` describes the holder.
"""
