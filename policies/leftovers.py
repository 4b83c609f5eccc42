"""Keys that have no effect because of another one, such as `ttl` with `mode: off`: they are named, and they do nothing.

Whoever turns the cache off in a hurry changes one word. Were what is left over an error, the whole edit would be
refused and the cache stay on; so it is a warning, and the keys are dropped before anything can act on them.
"""

from __future__ import annotations

from typing import TypeVar

from policies.schema.base import Strict
from policies.schema.cache import PROMISE_KEYS, CachePolicy
from policies.schema.document import PolicyDocument
from policies.schema.escalation import Escalate
from policies.schema.learning import Audit
from policies.schema.limits import Budget
from policies.schema.rollout import Rollout
from policies.schema.routes import OnAbort
from policies.schema.session import SessionPolicy
from policies.yamlread import Location

ModelT = TypeVar("ModelT", bound=Strict)

Leftover = tuple[Location, str]


def without_leftovers(document: PolicyDocument) -> tuple[PolicyDocument, list[Leftover]]:
    """The document as it acts, and the path of each key that was dropped, with a sentence on why."""
    found: list[Leftover] = []
    routes = []
    for index, route in enumerate(document.routes):
        path: Location = ("routes", index)
        if route.tier != "auto":
            route = _drop(route, ("quality_target",), path, "has an effect only with 'tier: auto'", found)
        if document.session is None or document.session.pin is None:
            route = _drop(route, ("sticky",), path, "has an effect only with 'session'", found)
        if route.on_abort is not None:
            route = route.model_copy(update={"on_abort": _on_abort(route.on_abort, (*path, "on_abort"), found)})
        if route.escalate is not None:
            route = route.model_copy(update={"escalate": _escalate(route.escalate, (*path, "escalate"), found)})
        routes.append(route)
    on_abort = _on_abort(document.on_abort, ("on_abort",), found)
    update = {
        "routes": tuple(routes),
        "on_abort": on_abort,
        "budget": document.budget and _budget(document.budget, found),
        "session": document.session and _session(document.session, found),
        "audit": _audit(document, found),
        "cache": _cache(document.cache, found),
        "rollout": _rollout(document.rollout, found),
        "escalate": document.escalate and _escalate(document.escalate, ("escalate",), found),
    }
    return (document.model_copy(update=update) if found else document), found


def _audit(document: PolicyDocument, found: list[Leftover]) -> Audit | None:
    if document.audit is None or document.learn == "on":
        return document.audit
    found.append((("audit",), "'audit' has no effect with 'learn: off': it is passed over."))
    return None


def _on_abort(given: OnAbort, path: Location, found: list[Leftover]) -> OnAbort:
    if given.mode == "drain":
        return given
    return _drop(given, ("max_time", "max_tokens"), path, "has an effect only with 'mode: drain'", found)


def _escalate(given: Escalate, path: Location, found: list[Leftover]) -> Escalate:
    if not given.when:
        names = tuple(name for name in Escalate.model_fields if name != "when")
        return _drop(given, names, path, "has no effect without a check in 'when'", found)
    if not given.asks_confidence:
        return _drop(given, ("confidence", "mean_logprob"), path, "has an effect only with 'low_confidence'", found)
    return given


def _budget(given: Budget, found: list[Leftover]) -> Budget:
    if given.when_exhausted == "queue":
        return given
    return _drop(given, ("queue_at_most",), ("budget",), "has an effect only with 'when_exhausted: queue'", found)


def _session(given: SessionPolicy, found: list[Leftover]) -> SessionPolicy:
    if given.pin is not None:
        return given
    names = tuple(name for name in SessionPolicy.model_fields if name != "pin")
    return _drop(given, names, ("session",), "has no effect with 'pin: off'", found)


def _cache(given: CachePolicy, found: list[Leftover]) -> CachePolicy:
    if given.mode == "off":
        names = tuple(name for name in CachePolicy.model_fields if name != "mode")
        return _drop(given, names, ("cache",), "has no effect with 'mode: off'", found)
    if given.mode == "exact":
        names = ("threshold", "max_false_hit_rate", *PROMISE_KEYS)
        return _drop(given, names, ("cache",), "has an effect only with 'mode: semantic'", found)
    return given


def _rollout(given: Rollout | None, found: list[Leftover]) -> Rollout | None:
    if given is None:
        return None
    path: Location = ("rollout",)
    if given.mode == "shadow":
        return _drop(given, ("steps", "every", "guard"), path, "has no effect with 'mode: shadow'", found)
    if not given.steps:
        return _drop(given, ("every",), path, "has an effect only with 'steps'", found)
    return given


def _drop(given: ModelT, names: tuple[str, ...], path: Location, why: str, found: list[Leftover]) -> ModelT:
    """A copy in which these keys have their defaults; those that said something are added to `found`."""
    said = [name for name in names if name in given.model_fields_set and getattr(given, name) is not None]
    found += [((*path, name), f"'{name}' {why}: it is passed over.") for name in said]
    fields = type(given).model_fields
    return given.model_copy(update={name: fields[name].default for name in said}) if said else given
