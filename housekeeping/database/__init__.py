"""Access to PostgreSQL: connections, transactions, column types, compiled queries, state machines.

Start with `connection`, which defines the database handle and the base class of every model. It also has what depends
on internals of peewee's connections and transactions.
"""
