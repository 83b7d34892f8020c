import base64
import hmac
import time
from collections.abc import Mapping


def is_from(secret: str, headers: Mapping[str, str], body: bytes) -> bool:
    """Return whether a request was signed with the secret within the last five minutes."""
    key = base64.b64decode(secret.removeprefix("whsec_"))
    signed = f"{headers['webhook-id']}.{headers['webhook-timestamp']}.".encode() + body
    expected = f"v1,{base64.b64encode(hmac.digest(key, signed, 'sha256')).decode()}"
    is_signed = any(hmac.compare_digest(each, expected) for each in headers["webhook-signature"].split())
    return is_signed and abs(time.time() - int(headers["webhook-timestamp"])) < 300
