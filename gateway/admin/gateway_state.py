"""`/admin/v1/models`, `backends`, `policies`: what this gateway serves, and how it is. No file is ever edited."""

from __future__ import annotations

import asyncio
import dataclasses
import tempfile
from pathlib import Path
from typing import Annotated, Any

import msgspec

from gateway.admin.call import AdminRoute, Call
from gateway.dialects.errors import NotFound
from gateway.settings import ModelSettings
from policies.check import check
from policies.load import Policy
from policies.yamlfile import Problem


class Price(msgspec.Struct, frozen=True):
    """Dollars per million tokens, of the platform file. `batch_factor`: of it, what lines of a batch pay."""

    version: str
    input_usd_per_million: str
    output_usd_per_million: str
    cached_input_usd_per_million: str | None
    batch_factor: str | None


class Model(msgspec.Struct, frozen=True, kw_only=True):
    """A public model name. `price` is null where the bundled price list has it."""

    name: str
    kind: str
    tier: str | None
    backend: str
    upstream_model: str
    context_length: int
    max_output_tokens: int | None
    capabilities: list[str]
    price: Price | None


class Replica(msgspec.Struct, frozen=True, kw_only=True):
    """One address of a backend, as the answering gateway process sees it."""

    base_url: str
    state: str
    outstanding: int
    failures: int
    requests_total: int
    failures_total: int
    back_in_s: float
    last_error: str | None
    work_tokens: int


class Backend(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    dialect: str
    engine: str | None
    models: list[str]
    replicas: list[Replica]


class Models(msgspec.Struct, frozen=True):
    data: list[Model]


class Backends(msgspec.Struct, frozen=True):
    """`worker` is the gateway process that answers: each counts for itself."""

    worker: int
    data: list[Backend]


class PolicyLine(msgspec.Struct, frozen=True, kw_only=True):
    """A policy in force. `version` changes with its text."""

    name: str
    version: str
    owner: str
    file: str
    applies_to: dict[str, Any]
    rules: list[str]


class PolicyWhole(PolicyLine, frozen=True, kw_only=True):
    """`document` is the policy as it is understood, defaults filled in."""

    document: dict[str, Any]


class PolicyProblem(msgspec.Struct, frozen=True, kw_only=True):
    file: str
    line: int
    column: int
    message: str
    path: str
    suggestion: str | None
    severity: str


class Policies(msgspec.Struct, frozen=True, kw_only=True):
    """The set in force, and why the folder's present content is not, if it is not."""

    version: str
    problems: list[PolicyProblem]
    data: list[PolicyLine]


class PolicyText(msgspec.Struct, frozen=True, kw_only=True):
    """`text` is the YAML of a policy. `file`: the name under which problems speak of it."""

    text: str
    file: Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}\.ya?ml$")] = "policy.yaml"


class PolicyReport(msgspec.Struct, frozen=True, kw_only=True):
    """As of `tierline policy check FILE`: conflicts with other policies are not looked for."""

    ok: bool
    policies: list[str]
    errors: list[PolicyProblem]
    warnings: list[PolicyProblem]


async def models(call: Call[None, None]) -> Models:
    return Models([_model(name, model) for name, model in call.services.settings.models.items()])


async def backends(call: Call[None, None]) -> Backends:
    settings = call.services.settings
    found = [
        Backend(
            name=name,
            dialect=settings.backends[name].dialect,
            engine=settings.backends[name].engine,
            models=[model for model, described in settings.models.items() if described.backend == name],
            replicas=[Replica(**dataclasses.asdict(state)) for state in pool.everybody()],
        )
        for name, pool in call.services.pools.items()
    ]
    return Backends(call.services.worker, found)


async def policies(call: Call[None, None]) -> Policies:
    store = call.services.policies
    return Policies(
        version=store.current.version,
        problems=[_problem(one) for one in store.problems],
        data=[PolicyLine(**_line(policy)) for policy in store.current.policies],
    )


async def policy(call: Call[None, None]) -> PolicyWhole:
    name = call.path["policy"]
    for one in call.services.policies.current.policies:
        if one.name == name:
            return PolicyWhole(document=one.document.model_dump(mode="json"), **_line(one))
    raise NotFound(f"There is no policy '{name[:100]}' in force.")


async def check_policy(call: Call[None, PolicyText]) -> PolicyReport:
    settings, given = call.services.settings, call.body

    def checked() -> PolicyReport:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / given.file
            path.write_text(given.text, encoding="utf-8", newline="")
            report = check(path, settings.tiers_served(), list(settings.models))
        return PolicyReport(
            ok=report.ok,
            policies=list(report.policies),
            errors=[_problem(one) for one in report.errors],
            warnings=[_problem(one) for one in report.warnings],
        )

    return await asyncio.to_thread(checked)


ROUTES = [
    AdminRoute("GET", "/admin/v1/models", "The models of the platform file.", models, Models),
    AdminRoute(
        "GET", "/admin/v1/backends", "Backends and the health of their replicas.", backends, Backends, gateway_wide=True
    ),
    AdminRoute("GET", "/admin/v1/policies", "The policies in force.", policies, Policies, gateway_wide=True),
    AdminRoute(
        "POST", "/admin/v1/policies/check", "Check the text of a policy; nothing is kept.", check_policy, PolicyReport,
        body=PolicyText,
    ),
    AdminRoute("GET", "/admin/v1/policies/{policy}", "One policy.", policy, PolicyWhole, gateway_wide=True),
]  # fmt: skip


def _model(name: str, model: ModelSettings) -> Model:
    price = model.price
    return Model(
        name=name,
        kind=model.kind,
        tier=model.tier,
        backend=model.backend,
        upstream_model=model.upstream_model or name,
        context_length=model.context_length,
        max_output_tokens=model.max_output_tokens,
        capabilities=sorted(model.capabilities),
        price=None
        if price is None
        else Price(
            price.version,
            str(price.input_usd_per_million),
            str(price.output_usd_per_million),
            None if price.cached_input_usd_per_million is None else str(price.cached_input_usd_per_million),
            None if price.batch_factor is None else str(price.batch_factor),
        ),
    )


def _line(policy: Policy) -> dict[str, Any]:
    document = policy.document
    return {
        "name": policy.name,
        "version": policy.version,
        "owner": document.owner,
        "file": Path(policy.file).name,
        "applies_to": document.applies_to.model_dump(mode="json", exclude_defaults=True),
        "rules": [rule.name for rule in policy.rules],
    }


def _problem(problem: Problem) -> PolicyProblem:
    """With the name of the file only: where the folder lies is the gateway's own business."""
    return PolicyProblem(**{**dataclasses.asdict(problem), "file": Path(problem.file).name})
