"""Recipe for Flask-Session on the table that it creates."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from housekeeping.recipes import flask_session
from tests.integration.recipes.checked import assert_leaves, needs
from tests.internals.database import Database

pytestmark = [
    needs("flask", "flask_session", "flask_sqlalchemy", "psycopg"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]


def test_expired_sessions_go(postgres: Database, application_url: str) -> None:
    import flask
    import psycopg
    from flask_session.sqlalchemy import SqlAlchemySessionInterface
    from flask_sqlalchemy import SQLAlchemy

    application = flask.Flask(__name__)
    application.config["SQLALCHEMY_ENGINES"] = {}
    application.config["SQLALCHEMY_DATABASE_URI"] = "postgresql+psycopg://"
    application.config["SQLALCHEMY_ENGINE_OPTIONS"] = {"creator": lambda: psycopg.connect(application_url)}
    client = SQLAlchemy(application)
    model = SqlAlchemySessionInterface(application, client).sql_session_model
    now = datetime.now(UTC).replace(tzinfo=None)
    with application.app_context():
        for number, hours in enumerate((-30, -1, 1, 30)):
            client.session.add(model(f"session:{number}", b"{}", now + timedelta(hours=hours)))
        client.session.commit()
        client.engine.dispose()

    assert_leaves(postgres, flask_session(), ["session:2", "session:3"], table="sessions", key="session_id")
