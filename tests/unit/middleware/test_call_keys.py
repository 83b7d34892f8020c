"""Equal calls have equal keys, however they are written (D3)."""

from __future__ import annotations

import enum
import functools
import hashlib
import json
from collections.abc import Callable
from typing import Any

import dramatiq
import pytest
from dramatiq import Actor
from dramatiq.brokers.stub import StubBroker

from tests.internals.brokers import InvalidOption
from tests.internals.middleware import UnusableArguments, bind_call, check_key, digest, key_value


class Kind(enum.IntEnum):
    SMALL = 1


def work(project_id: int, kinds: Any = (1, 2), *, dry_run: bool = False) -> None: ...


def any_number(*numbers: int, **options: int) -> None: ...


def actor_of(function: Callable[..., Any]) -> Actor[..., Any]:
    return dramatiq.actor(broker=StubBroker(middleware=[]))(function)


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [
        ((7,), {}),
        ((), {"project_id": 7}),
        ((7, (1, 2)), {}),
        ((7, [1, 2]), {"dry_run": False}),
        ((), {"dry_run": False, "kinds": [1, 2], "project_id": 7}),
        ((7,), {"kinds": (Kind.SMALL, 2)}),
    ],
)
def test_equal_calls_have_equal_keys(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    # D3
    assert digest(actor_of(work), args, kwargs) == digest(actor_of(work), (7,), {})


@pytest.mark.parametrize(
    ("args", "kwargs"), [((8,), {}), (("7",), {}), ((7, [2, 1]), {}), ((7,), {"dry_run": True}), ((7, None), {})]
)
def test_different_calls_have_different_keys(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    # D3
    assert digest(actor_of(work), args, kwargs) != digest(actor_of(work), (7,), {})


def test_mapping_has_the_same_key_on_both_sides_of_the_queue() -> None:
    # D3: JSON turns its keys into text, which is ordered differently
    sent = digest(actor_of(work), (7, {10: "a", 9: "b"}), {})

    assert sent == digest(actor_of(work), (7, {"9": "b", "10": "a"}), {})


def test_format_of_keys_has_not_changed() -> None:
    # D3: a change needs a new KEY_VERSION
    assert digest(actor_of(work), (7,), {}) == "c7acda2e462a4945a10eb8ace56a6a84"


@pytest.mark.parametrize("values", [(7, "x"), ('b\n"é\u2028', -1), ("", 10**30), (True, None), (1.5, [1]), ({}, "{}")])
def test_key_is_the_digest_of_the_arguments_as_json_in_order_of_their_names(values: tuple[Any, Any]) -> None:
    def copy(ü: Any, source: Any) -> None: ...

    text = json.dumps({"source": values[1], "ü": values[0]}, separators=(",", ":"))

    assert digest(actor_of(copy), values, {}) == hashlib.sha256(text.encode()).hexdigest()[:32]


@pytest.mark.parametrize("key", [["project_id"], ("project_id",), lambda project_id, kinds, dry_run: project_id])
def test_key_of_named_arguments_ignores_the_others(key: Any) -> None:
    # D3
    def of(*args: Any, **kwargs: Any) -> str:
        return digest(actor_of(functools.wraps(work)(lambda *a, **k: None)), args, kwargs, key)

    key = key if not callable(key) else lambda project_id, kinds, *, dry_run: project_id
    assert of(7) == of(project_id=7, dry_run=True) == of(7, [3])
    assert of(7) != of(8)


def test_callable_gets_the_workers_arguments_with_defaults() -> None:
    # D3
    seen: list[Any] = []

    def key(project_id: int, kinds: Any, *, dry_run: bool) -> str:
        seen.append((project_id, kinds, dry_run))
        return str(kinds)

    written = digest(actor_of(work), (7, (3, 4)), {}, key)

    assert seen == [(7, [3, 4], False)]
    assert written == digest(actor_of(work), (7, [3, 4]), {}, key)


def test_callable_may_choose_its_parameter_names() -> None:
    # D3
    assert digest(actor_of(work), (7,), {}, lambda p, k, **rest: p) == digest(
        actor_of(work), (), {"project_id": 7}, lambda *args, **kwargs: args[0]
    )


@pytest.mark.parametrize(
    ("args", "kwargs"), [((), {}), ((1, 2, 3), {}), ((1,), {"colour": 1}), ((object(),), {}), (({1, 2},), {})]
)
def test_arguments_that_fit_no_call_or_message_are_refused(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    # D3
    with pytest.raises(UnusableArguments, match="work: its arguments"):
        digest(actor_of(work), args, kwargs)


def test_key_callable_that_fails_or_returns_nothing_is_refused() -> None:
    # D3
    actor = actor_of(work)
    call = bind_call(actor, (0,), {})

    with pytest.raises(UnusableArguments, match="work: its key: ZeroDivisionError"):
        key_value(actor, call, lambda project_id, kinds, dry_run: 1 // project_id)
    with pytest.raises(UnusableArguments, match="work: its key is None"):
        key_value(actor, call, lambda *args, **kwargs: None)
    with pytest.raises(UnusableArguments, match="cannot be compared"):
        digest(actor, (0,), {}, lambda *args, **kwargs: object())


@pytest.mark.parametrize(
    ("function", "key"),
    [
        (work, lambda project_id, kinds, *, dry_run: 1),
        (work, lambda project_id, kinds, dry_run: 1),
        (work, lambda p, k, **rest: 1),
        (work, lambda *args, **kwargs: 1),
        (work, ["kinds", "dry_run"]),
        (work, ("project_id",)),
        (work, None),
        (any_number, lambda *numbers, **options: 1),
        (any_number, ["numbers"]),
    ],
)
def test_key_that_fits_the_parameters_is_accepted(function: Callable[..., Any], key: Any) -> None:
    check_key(actor_of(function), "deduplication", key)


@pytest.mark.parametrize(
    ("function", "key"),
    [
        (work, lambda: 1),
        (work, lambda project_id: 1),
        (work, lambda kinds, project_id, *, dry_run: 1),
        (work, lambda project_id, kinds, more, dry_run: 1),
        (work, []),
        (work, ["colour"]),
        (work, [1]),
        (work, "project_id"),
        (work, 7),
        (work, iter(["project_id"])),
        (any_number, lambda numbers, **options: 1),
        (any_number, lambda *numbers: 1),
    ],
)
def test_key_that_does_not_fit_is_refused_with_a_valid_example(function: Callable[..., Any], key: Any) -> None:
    names = "project_id, kinds, dry_run" if function is work else "numbers, options"

    with pytest.raises(InvalidOption, match=rf"{function.__name__}: deduplication key .*should .*\({names}\)"):
        check_key(actor_of(function), "deduplication", key)


def class_based() -> Any:
    of_the_test = StubBroker(middleware=[])

    class Work(dramatiq.GenericActor):
        class Meta:
            broker = of_the_test

        def perform(self, project_id: int, kinds: Any = (1, 2), *, dry_run: bool = False) -> None: ...

    return Work.__actor__


def test_class_based_actor_has_the_keys_of_its_perform() -> None:  # D3
    actor = class_based()

    assert digest(actor, (7,), {}) == digest(actor, (), {"project_id": 7, "dry_run": False})
    assert digest(actor, (7,), {}) == digest(actor_of(work), (7,), {})


def test_key_option_of_a_class_based_actor_names_arguments_of_perform() -> None:  # D3
    actor = class_based()

    check_key(actor, "deduplication", ["project_id"])
    check_key(actor, "deduplication", lambda project_id, kinds, *, dry_run: project_id)
    with pytest.raises(InvalidOption, match=r"\(project_id, kinds, dry_run\)"):
        check_key(actor, "deduplication", ["args"])
