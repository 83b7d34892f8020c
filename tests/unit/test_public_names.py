"""Tests of the public names."""

from __future__ import annotations

import subprocess
import sys

NAMES = """
housekeeping.install
housekeeping.complete_in
housekeeping.enqueue_many
housekeeping.ExclusiveLease
housekeeping.fence
housekeeping.throttle
housekeeping.Sweep
housekeeping.events.build_dropped
housekeeping.testing.ManualClock
housekeeping.web.wsgi_app
__import__("housekeeping.workers") and housekeeping.workers.bulk_imports.models.BulkImport
__import__("housekeeping.workers") and housekeeping.workers.user_status_cleanup.models.UserStatus
__import__("housekeeping.workers") and housekeeping.workers.object_storage.pending_uploads.prepare
"""


def test_every_public_name_can_be_imported() -> None:
    # A new process, because other tests have imported these modules.
    subprocess.run([sys.executable, "-W", "error", "-c", f"import housekeeping\n{NAMES}"], check=True, timeout=60)


def test_importing_the_package_imports_no_dependency() -> None:
    brought = "[name for name in sys.modules if name.split('.')[0] in ('dramatiq', 'peewee', 'redis', 'pydantic')]"
    code = f"import sys, housekeeping; sys.exit(bool({brought}))"

    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
