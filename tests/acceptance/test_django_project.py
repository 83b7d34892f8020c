"""App for Django: the page own-sweep-django.md in a browser, and a project with two databases."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import psycopg2
import pytest
from selenium.webdriver.chromium.webdriver import ChromiumDriver
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support import expected_conditions as until

from tests.acceptance.browser import Wait
from tests.acceptance.examples import without_settings
from tests.acceptance.pages import in_a_shell
from tests.acceptance.processes import eventually, started
from tests.acceptance.test_dashboard import browser as browser
from tests.acceptance.test_dashboard import one_browser as one_browser
from tests.acceptance.test_dashboard import wait as wait
from tests.acceptance.test_own_sweep_pages import Reader
from tests.acceptance.test_own_sweep_pages import reader as own_sweep_reader
from tests.acceptance.test_own_sweep_pages import warehouse as warehouse
from tests.internals.embedded import embedded
from tests.internals.ledger import logged_actions

pytestmark = pytest.mark.slow

reader = own_sweep_reader

MODULES: Final = {
    "__init__": "",
    "settings": """
import os
SECRET_KEY = "a secret of the tests"
ALLOWED_HOSTS = ["testserver"]
INSTALLED_APPS = ["django.contrib.auth", "django.contrib.contenttypes", "django.contrib.sessions"]
INSTALLED_APPS += ["housekeeping.contrib.django", "shop"]
MIDDLEWARE = ["django.contrib.sessions.middleware.SessionMiddleware",
              "django.contrib.auth.middleware.AuthenticationMiddleware"]
ROOT_URLCONF = "shop.urls"
DATABASE_ROUTERS = ["shop.models.Router"]
SERVER = {"ENGINE": "django.db.backends.postgresql", "HOST": os.environ["PGHOST"], "USER": os.environ["PGUSER"]}
DATABASES = {"default": {**SERVER, "NAME": "shop"}, "events": {**SERVER, "NAME": "events"}}
USE_TZ = True
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
HOUSEKEEPING = {"REDIS_URL": os.environ["SHOP_REDIS_URL"], "BUILT_IN": (), "DATABASES": ["default", "events"],
                "KEPT": {"auth_user": "accounts are closed by hand"}, "WORKERS": {"shop.old_events": {"batch_size": 2}}}
HOUSEKEEPING |= {"GRACE": 5} if "WRONG" in os.environ else {}
""",
    "models": """
from django.db import models


class Voucher(models.Model):
    expires_at = models.DateTimeField(db_index=True)


class Event(models.Model):
    at = models.DateTimeField()


class Router:
    def db_for_write(self, model, **hints):
        return "events" if model is Event else None

    db_for_read = db_for_write

    def allow_migrate(self, db, app_label, model_name=None, **hints):
        return (db == "events") == (model_name == "event") if app_label != "housekeeping" else None
""",
    "sweeps": """
from datetime import timedelta

from housekeeping import Delete, Rows, Sweep
from shop.models import Event, Voucher

expired = Sweep("shop.expired", Rows(Voucher, stale=lambda row, now: row.expires_at <= now, action=Delete()))
old = Rows(Event, stale=lambda row, now: row.at <= now - timedelta(days=30), order="at", action=Delete())
old_events = Sweep("shop.old_events", old, database="events")
""",
    "urls": """
from django.urls import include, path

urlpatterns = [path("ops/", include("housekeeping.contrib.django.urls"))]
""",
    "tests": """
import re
from datetime import timedelta

from django.contrib.auth.models import Permission, User
from django.test import TransactionTestCase
from django.utils import timezone

from housekeeping.contrib.django import load_settings
from shop.models import Event

PAUSE = "/ops/workers/shop.old_events/pause"


class Tests(TransactionTestCase):
    databases = ["default", "events"]

    def enter(self, name, *permissions):
        user = User.objects.create_user(name)
        user.user_permissions.set(Permission.objects.filter(codename__in=permissions))
        self.client.force_login(user)

    def test_databases_are_those_of_the_tests(self):
        settings = load_settings()
        self.assertIn("dbname=test_shop&", settings.database_url)
        self.assertIn("dbname=test_events&", settings.databases["events"])

    def test_anonymous_request_leads_to_the_login(self):
        self.assertRedirects(self.client.get("/ops/runs?since=2h"),
                             "/accounts/login/?next=/ops/runs%3Fsince%3D2h", fetch_redirect_response=False)

    def test_user_without_permission_is_refused(self):
        self.enter("eve")
        self.assertEqual(self.client.get("/ops/").status_code, 403)

    def test_user_who_may_read_changes_nothing(self):
        self.enter("eve", "view_dashboard")
        page = self.client.get("/ops/workers/shop.old_events")
        self.assertContains(page, "You do not have permission to pause, narrow or resume it.")
        self.assertEqual(self.client.post(PAUSE).status_code, 403)

    def test_user_who_may_change_pauses_a_sweep(self):
        self.enter("kim", "view_dashboard", "change_dashboard")
        page = self.client.get("/ops/workers/shop.old_events").content.decode()
        [token] = set(re.findall('name="form_token" value="([^"]+)"', page))
        answer = self.client.post(PAUSE, {"form_token": token, "reason": "peak"})
        self.assertEqual((answer.status_code, answer["Location"]), (303, "/ops/workers/shop.old_events"))
        self.assertContains(self.client.get("/ops/actions"), "kim@<wbr>127.")
""",
}


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, dict[str, str]]]:
    """Yield the folder and the environment of a project whose two databases have their tables."""
    folder = tmp_path_factory.mktemp("project")
    (folder / "shop").mkdir()
    for name, text in MODULES.items():
        (folder / f"shop/{name}.py").write_text(text)
    with embedded.start() as servers:
        place = psycopg2.extensions.parse_dsn(servers.database_url)
        own = {"PGHOST": place["host"], "PGUSER": place["user"], "SHOP_REDIS_URL": servers.redis_url}
        own |= {"DJANGO_SETTINGS_MODULE": "shop.settings", "PYTHONPATH": str(folder)}
        environment = without_settings(os.environ, **own)
        environment["PATH"] = os.pathsep.join((str(Path(sys.executable).parent), environment["PATH"]))
        connection = psycopg2.connect(servers.database_url)
        connection.autocommit = True
        with connection.cursor() as cursor:
            cursor.execute("CREATE DATABASE shop")
            cursor.execute("CREATE DATABASE events")
        connection.close()
        manage = "python -m django migrate --run-syncdb"
        printed = in_a_shell(f"({manage}; {manage} --database events) 2>&1", environment, folder)
        (folder / "first.log").write_text(printed)
        yield folder, environment


#: Runs a command of the project until it ends; returns its exit status and its output.
Manage = Callable[..., tuple[int, str]]


@pytest.fixture
def manage(project: tuple[Path, dict[str, str]], tmp_path: Path) -> Manage:
    folder, environment = project

    def run(*arguments: str, **more: str) -> tuple[int, str]:
        command = [sys.executable, "-W", "error", "-m", "django", *arguments]
        with started(command, environment | more, tmp_path / "manage.log") as process:
            return process.running.wait(90), process.text()

    return run


def execute(project: tuple[Path, dict[str, str]], name: str, query: str) -> list[tuple[Any, ...]]:
    """Execute a statement in a database of the project; return its rows."""
    with psycopg2.connect(host=project[1]["PGHOST"], user=project[1]["PGUSER"], dbname=name) as connection:
        with connection.cursor() as cursor:
            cursor.execute(query)
            return cursor.fetchall() if cursor.description else []


def test_sweeps_of_both_databases_run_with_djangos_settings(
    project: tuple[Path, dict[str, str]], manage: Manage, tmp_path: Path
) -> None:
    execute(
        project,
        "events",
        "INSERT INTO shop_event (at) SELECT now() - n * interval '20 days' FROM generate_series(0, 4) n",
    )
    execute(project, "shop", "INSERT INTO shop_voucher (expires_at) VALUES (now()), (now() + interval '1 day')")

    status, run = manage("housekeeping", "run", "shop.old_events")
    command = [sys.executable, "-m", "django", "housekeeping", "worker"]
    with started(command, project[1], tmp_path / "worker.log") as worker:
        manage("housekeeping", "enqueue", "shop.expired")
        eventually(lambda: execute(project, "shop", "SELECT count(*) FROM shop_voucher") == [(1,)], worker)

    assert status == 0 and "deleted_rows 3, batches 2" in run
    assert execute(project, "events", "SELECT count(*) FROM shop_event") == [(2,)]


def test_migrations_leave_nothing_to_init_and_print_the_statements(manage: Manage) -> None:
    assert manage("makemigrations", "--check", "--dry-run", "housekeeping")[0] == 0
    assert manage("housekeeping", "init")[1].count(": up to date") == 2
    assert (
        'CREATE TABLE "another".runs' in manage("sqlmigrate", "housekeeping", "0001", HOUSEKEEPING_SCHEMA="another")[1]
    )


def test_first_migration_warns_of_no_table_that_it_creates(project: tuple[Path, dict[str, str]]) -> None:
    printed = (project[0] / "first.log").read_text()

    assert "Applying housekeeping.0001_initial... OK" in printed
    assert "W001" not in printed


def test_database_check_warns_of_missing_index_and_undecided_tables(manage: Manage) -> None:
    found = manage("check", "--database", "default", "--database", "events")[1]

    assert "(housekeeping.W001) shop.old_events, " in found and "shop.expired" not in found
    assert "(housekeeping.W002) 5 tables are undecided: auth_group, " in found and "django_migrations" not in found


def test_wrong_setting_fails_the_check_and_the_command(manage: Manage) -> None:
    for command in (("check",), ("housekeeping", "list")):
        status, said = manage(*command, WRONG="1")

        text = "HOUSEKEEPING_GRACE is not a setting (in HOUSEKEEPING of Django's settings); did you mean"
        assert status != 0 and text in said


def test_project_passes_its_tests_on_the_test_databases(manage: Manage) -> None:
    status, said = manage("test", "shop")

    assert status == 0 and "Ran 5 tests" in said, said


def test_page_of_a_django_project_works_as_written(reader: Reader, browser: ChromiumDriver, wait: Wait) -> None:
    with reader:
        reader.read("own-sweep-django")
        browser.get(f"{reader.address}ops/housekeeping/workers/shop.expired_vouchers")
        browser.find_element(By.NAME, "username").send_keys("kim")
        browser.find_element(By.NAME, "password").send_keys("trial", Keys.ENTER)
        wait.until(until.presence_of_element_located((By.CSS_SELECTOR, "#pause [name=reason]"))).send_keys(Keys.ENTER)
        wait.until(until.text_to_be_present_in_element((By.CSS_SELECTOR, ".said"), "paused"))

    assert urlsplit(browser.current_url).path == "/ops/housekeeping/workers/shop.expired_vouchers"
    assert reader.rows("SELECT code FROM shop_voucher ORDER BY 1") == [(f"voucher {n}",) for n in range(6, 10)]
    assert [(each.user, each.action) for each in logged_actions(1)] == [("kim@127.0.0.1", "pause")]
