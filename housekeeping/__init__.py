"""Keeps a PostgreSQL application clean: five workers on Dramatiq, the middleware under them, the means to see it."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from housekeeping import testing as testing
    from housekeeping.core import events as events
    from housekeeping.core.redis.client import throttle as throttle
    from housekeeping.core.settings import Settings as Settings
    from housekeeping.database.replicas.routing import read_database as read_database
    from housekeeping.installation import install as install
    from housekeeping.leases.current import fence as fence
    from housekeeping.leases.lease import ExclusiveLease as ExclusiveLease
    from housekeeping.middleware.enqueueing.many import enqueue_many as enqueue_many
    from housekeeping.sweeps import AlertThresholds as AlertThresholds
    from housekeeping.sweeps import BaseModel as BaseModel
    from housekeeping.sweeps import Breaker as Breaker
    from housekeeping.sweeps import Call as Call
    from housekeeping.sweeps import Delete as Delete
    from housekeeping.sweeps import DropPartitions as DropPartitions
    from housekeeping.sweeps import LeaseConfig as LeaseConfig
    from housekeeping.sweeps import StateMachine as StateMachine
    from housekeeping.sweeps import Sweep as Sweep
    from housekeeping.sweeps import ThrottleLimits as ThrottleLimits
    from housekeeping.sweeps import Transition as Transition
    from housekeeping.sweeps import UtcDateTimeField as UtcDateTimeField

__version__ = "0.1.0"

#: Public names and where they live; looked up when first used, so that importing the package costs and changes nothing.
_PUBLIC: Final = {
    "AlertThresholds": "housekeeping.sweeps",
    "BaseModel": "housekeeping.sweeps",
    "Breaker": "housekeeping.sweeps",
    "Call": "housekeeping.sweeps",
    "Delete": "housekeeping.sweeps",
    "DropPartitions": "housekeeping.sweeps",
    "ExclusiveLease": "housekeeping.leases.lease",
    "ThrottleLimits": "housekeeping.sweeps",
    "LeaseConfig": "housekeeping.sweeps",
    "Settings": "housekeeping.core.settings",
    "StateMachine": "housekeeping.sweeps",
    "Sweep": "housekeeping.sweeps",
    "Transition": "housekeeping.sweeps",
    "UtcDateTimeField": "housekeeping.sweeps",
    "enqueue_many": "housekeeping.middleware.enqueueing.many",
    "fence": "housekeeping.leases.current",
    "install": "housekeeping.installation",
    "read_database": "housekeeping.database.replicas.routing",
    "throttle": "housekeeping.core.redis.client",
}
_MODULES: Final = {"events": "housekeeping.core.events", "testing": "housekeeping.testing"}
__all__ = [
    "AlertThresholds",
    "BaseModel",
    "Breaker",
    "Call",
    "Delete",
    "DropPartitions",
    "ExclusiveLease",
    "ThrottleLimits",
    "LeaseConfig",
    "Settings",
    "StateMachine",
    "Sweep",
    "Transition",
    "UtcDateTimeField",
    "__version__",
    "enqueue_many",
    "events",
    "fence",
    "install",
    "read_database",
    "testing",
    "throttle",
]


if not TYPE_CHECKING:  # else a misspelt name would be anything to a type checker

    def __getattr__(name: str) -> Any:
        if name in _MODULES:
            return importlib.import_module(_MODULES[name])
        if name in _PUBLIC:
            return getattr(importlib.import_module(_PUBLIC[name]), name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
