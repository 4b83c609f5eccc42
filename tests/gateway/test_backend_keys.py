"""Keys of backends come from the environment: one that is missing or cannot be sent is named before anything starts."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from bench.mock_upstream import MockUpstream
from gateway import settings
from gateway.backend_pools import MissingSecret
from gateway.services import Services
from tests.gateway.front_door import POLICY, configuration, front_door


def document(upstream: MockUpstream) -> dict[str, object]:
    made = configuration({"up": upstream})
    made["backends"]["up"]["api_key_env"] = "UPSTREAM_KEY"
    return made


@pytest.mark.parametrize(
    "value", ["", "secret\n", "sec\nret", " secret", "secret ", "sécret", "secret\x7f", "\tsecret"]
)
async def test_a_key_that_cannot_be_sent_is_named_by_its_variable(
    tmp_path: Path, upstream: MockUpstream, monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    monkeypatch.setenv("UPSTREAM_KEY", value)
    (tmp_path / "policies").mkdir()
    (tmp_path / "policies/default.yaml").write_text(POLICY)
    (tmp_path / "tierline.yaml").write_text(yaml.safe_dump(document(upstream)))
    with pytest.raises(MissingSecret, match=r"backend 'up' .* environment variable UPSTREAM_KEY") as refused:
        await Services.open(settings.load(tmp_path / "tierline.yaml"))
    assert "cret" not in str(refused.value), "what is in it is nobody's to read"


async def test_a_key_is_sent_as_it_is(tmp_path: Path, upstream: MockUpstream, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UPSTREAM_KEY", "sk-a b/c+d=")
    async with front_door(tmp_path, document(upstream)) as door:
        assert (await door.chat()).status_code == 200
        assert upstream.records[-1].headers["authorization"] == "Bearer sk-a b/c+d="
