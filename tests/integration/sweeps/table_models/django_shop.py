"""Models of a Django application, with every kind of column and key that a sweep may meet."""

from __future__ import annotations

import uuid

import django
from django.conf import settings
from django.contrib.postgres.fields import ArrayField
from django.db import models

settings.configure(
    DATABASES={"default": {"ENGINE": "django.db.backends.postgresql"}},
    DEFAULT_AUTO_FIELD="django.db.models.BigAutoField",
    USE_TZ=True,
)
django.setup()


class Customer(models.Model):
    class Meta:
        app_label = "shop"


class Session(models.Model):
    class State(models.TextChoices):
        OPEN = "open"
        CLOSED = "closed"

    id = models.UUIDField(primary_key=True, default=uuid.uuid4)
    customer = models.ForeignKey(Customer, models.CASCADE, null=True)
    expires = models.DateTimeField(db_column="expires_at", null=True)
    state = models.CharField(max_length=20, choices=State.choices, default=State.OPEN)
    details = models.JSONField(default=dict)
    tags = ArrayField(models.CharField(max_length=20), default=list)
    address = models.GenericIPAddressField(null=True)
    price = models.DecimalField(max_digits=10, decimal_places=2, default=0)
    secret = models.BinaryField(default=b"")
    index = models.SmallIntegerField(default=0)

    class Meta:
        app_label = "shop"


class LateSession(Session):
    class Meta:
        app_label = "shop"
        proxy = True


class OrderLine(models.Model):
    pk = models.CompositePrimaryKey("order_id", "line")
    order_id = models.BigIntegerField()
    line = models.IntegerField()
    touched_on = models.DateField()

    class Meta:
        app_label = "shop"
        db_table = 'order"."line'


class Dated(models.Model):
    at = models.DateTimeField()

    class Meta:
        app_label = "shop"
        abstract = True


class Document(models.Model):
    at = models.DateTimeField()

    class Meta:
        app_label = "shop"


class Invoice(Document):
    number = models.TextField()

    class Meta:
        app_label = "shop"
