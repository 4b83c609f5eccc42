"""What `tierline.yaml` says of a bundled engine reaches its command line under the engine's own names."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

import pytest

from engine.__main__ import parse_arguments
from engine.config import KV_DTYPES, PRECISIONS, SPECULATIVE
from engine.limits import NUM_DRAFTS
from engine.server.parsers import REASONING_PARSERS, TOOL_PARSERS
from gateway.processes import process_specs
from gateway.settings import load
from gateway.settings.serving import EngineSettings
from tests.gateway.commands import configuration


def choices(name: str) -> tuple[str, ...]:
    return get_args(EngineSettings.model_fields[name].annotation)


def test_choices_are_the_engines() -> None:
    assert choices("tool_parser") == TOOL_PARSERS
    assert choices("reasoning_parser") == REASONING_PARSERS
    assert choices("speculative") == SPECULATIVE
    assert choices("kv_dtype") == KV_DTYPES
    assert choices("precision") == PRECISIONS
    assert EngineSettings(model="m").num_speculative_tokens == NUM_DRAFTS


def test_parsers_and_heads_are_handed_on(tmp_path: Path) -> None:
    engine = (
        "{model: w.gguf, speculative: eagle3, draft_model: head, tool_parser: qwen3_coder, reasoning_parser: think}"
    )
    config = configuration(tmp_path, port=9100, engine=engine)
    settings = load(config)
    specs = process_specs(settings, config, {"e": tmp_path / "w.gguf"}, {"e": Path("h")})
    line = " ".join(next(spec for spec in specs if spec.name == "engine-e").argv)
    for part in ("--tool-parser qwen3_coder", "--reasoning-parser think", "--speculative eagle3", "--draft-model h"):
        assert part in line


def test_a_layout_is_handed_on(tmp_path: Path) -> None:
    engine = "{model: w.gguf, tensor_parallel: 4, pipeline_parallel: 2}"
    config = configuration(tmp_path, port=9100, engine=engine)
    specs = process_specs(load(config), config, {"e": tmp_path / "w.gguf"})
    line = " ".join(next(spec for spec in specs if spec.name == "engine-e").argv)
    assert "--tensor-parallel 4" in line
    assert "--pipeline-parallel 2" in line


@pytest.mark.parametrize(
    ("said", "read"),
    [
        ("", {}),
        ("kv_dtype: fp8", {"kv_dtype": "fp8"}),
        ("graphs: false", {"no_graphs": True}),
        ("deterministic: true", {"deterministic": True}),
        ("overlap: true", {"overlap": True}),
        ("trace: steps.json", {"trace": "steps.json"}),
    ],
)
def test_how_steps_run_reaches_the_engine(tmp_path: Path, said: str, read: dict[str, Any]) -> None:
    """The engine's own parser reads the command line; a relative path begins where the file lies."""
    config = configuration(tmp_path, port=9100, engine=f"{{model: w.gguf, {said}}}")
    specs = process_specs(load(config), config, {"e": tmp_path / "w.gguf"})
    argv = next(spec for spec in specs if spec.name == "engine-e").argv
    options = vars(parse_arguments(list(argv[argv.index("engine") + 1 :])))
    defaults = {"kv_dtype": "auto", "no_graphs": False, "deterministic": False, "overlap": False, "trace": None}
    if "trace" in read:
        read = {"trace": config.parent / read["trace"]}
    assert {name: options[name] for name in defaults} == defaults | read


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"tool_parser": "harmony", "reasoning_parser": "think"}, "harmony is one form"),
        ({"speculative": "eagle3"}, "need each other"),
        ({"draft_model": "x"}, "need each other"),
        ({"tool_parser": "llama2"}, "tool_parser"),
        ({"tensor_parallel": 2, "lora_dir": "d"}, "'lora_dir' does not go with"),
        ({"pipeline_parallel": 2, "kv_host_bytes": 1 << 30}, "'kv_host_bytes' does not go with"),
        ({"tensor_parallel": 0}, "tensor_parallel"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        EngineSettings(model="m", **values)
