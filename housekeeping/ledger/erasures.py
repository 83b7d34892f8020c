"""Erasures of persons and tenants in the ledger of the database ``main``, and the HMACs that stand for their keys."""

from __future__ import annotations

import hashlib
import hmac
import json
from collections.abc import Sequence
from typing import Final

from pydantic import SecretStr

STATES: Final = ("requested", "running", "done", "incomplete", "failed", "refused")


def keyed_digest(secret: SecretStr, purpose: str, text: str) -> str:
    """Return the HMAC-SHA256 of a text in hexadecimal.

    Parameters:
      secret: The setting ``HOUSEKEEPING_ERASURE_KEY``.
      purpose: What the digest is for, such as ``key``; so that one of another purpose is never the same.
    """
    message = json.dumps([purpose, text]).encode()
    return hmac.new(secret.get_secret_value().encode(), message, hashlib.sha256).hexdigest()


def key_hmac(secret: SecretStr, subject: str, key: Sequence[str]) -> str:
    """Return the HMAC that stands for a subject in receipts, lists, pages and the log.

    Parameters:
      subject: Name of the `Subject`.
      key: Values of its primary key, as PostgreSQL writes them (``column::text``).
    """
    return keyed_digest(secret, "key", json.dumps([subject, *key]))
