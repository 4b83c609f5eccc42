"""What the official SDK's types say of a response and of its events, taken literally."""

from __future__ import annotations

import json
from typing import Any, Literal, get_args, get_origin, get_type_hints

import httpx
from openai.types.responses import Response, ResponseItemList, ResponseStreamEvent
from pydantic import BaseModel

# The API itself sends `store`; `tierline` and the details of an error are Tierline's own.
OWN = {"response.store", "store", "tierline", "error"}

# The type of each event by its name.
EVENTS: dict[str, type[BaseModel]] = {
    get_args(kind.model_fields["type"].annotation)[0]: kind for kind in get_args(get_args(ResponseStreamEvent)[0])
}


def unknown(model: BaseModel, path: str = "") -> set[str]:
    """Fields, at whatever depth, that the types do not have."""
    found = {f"{path}{name}" for name in model.model_extra or {}}
    for name in model.model_fields_set:
        value = getattr(model, name, None)
        for i, item in enumerate(value if isinstance(value, list) else [value]):
            if isinstance(item, BaseModel):
                found |= unknown(item, f"{path}{name}." if item is value else f"{path}{name}[{i}].")
    return found


def checked(kind: type[BaseModel], data: Any) -> BaseModel:
    """`data` as an object of that type, without any conversion and with no field too many."""
    model = kind.model_validate(data, strict=True)
    assert unknown(model) <= OWN, unknown(model) - OWN
    return model


def checked_response(data: dict[str, Any]) -> Response:
    made = checked(Response, data)
    assert isinstance(made, Response)
    missing = set(Response.model_fields) - set(data) - NEVER
    assert not missing, f"the API has {missing} in every response"
    return made


def checked_items(data: dict[str, Any]) -> list[dict[str, Any]]:
    checked(ResponseItemList, data)
    return list(data["data"])


# Of features that Tierline refuses to be asked for.
NEVER = {
    "access_programs", "conversation", "image", "input_transformations", "moderation", "prompt",
    "prompt_cache_diagnostics", "prompt_cache_options", "tool_usage",
}  # fmt: skip


def events(response: httpx.Response) -> list[dict[str, Any]]:
    """The events of a stream, each checked: its type, its name, its number."""
    assert response.status_code == 200, response.text
    found: list[dict[str, Any]] = []
    for block in response.text.split("\n\n"):
        if not block or block.startswith(":"):
            continue
        name, data = (line.partition(": ")[2] for line in block.split("\n"))
        event = json.loads(data)
        assert event["type"] == name
        assert event["sequence_number"] == len(found)
        checked(EVENTS[name], event)
        found.append(event)
    return found


def folded(told: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The output that the events of a stream tell of, checked on the way: everything is announced, filled by its
    deltas, said once more, and closed, in this order."""
    output: list[dict[str, Any]] = []
    open_item: dict[str, Any] | None = None
    text: str | None = None  # of the part that grows
    for event in told:
        kind = event["type"].removeprefix("response.")
        if "output_index" in event and kind != "output_item.added":
            assert open_item is not None
            assert event["output_index"] == len(output)
            assert event.get("item_id", open_item["id"]) == open_item["id"]
        match kind:
            case "output_item.added":
                assert open_item is None
                assert event["output_index"] == len(output)
                open_item = event["item"]
                assert open_item["status"] == "in_progress"
                text = "" if open_item["type"] == "function_call" else None
            case "content_part.added" | "reasoning_summary_part.added":
                assert text is None
                assert event["part"].get("text", event["part"].get("refusal")) == ""
                text = ""
            case _ if kind.endswith(".delta"):
                assert text is not None
                text += event["delta"]
            case "content_part.done" | "reasoning_summary_part.done":
                assert event["part"].get("text", event["part"].get("refusal")) == text
                text = None
            case "output_item.done":
                assert open_item is not None
                if open_item["type"] == "function_call":
                    assert event["item"]["arguments"] == text
                    text = None
                assert text is None
                assert {**event["item"], "status": None}.keys() >= {**open_item, "status": None}.keys()
                output.append(event["item"])
                open_item = None
            case _ if kind.endswith(".done"):
                field = {"refusal.done": "refusal", "function_call_arguments.done": "arguments"}.get(kind, "text")
                assert event[field] == text
    assert open_item is None
    return output


def types_of(union: Any) -> set[str]:
    """The `type` of each member of a union of typed dictionaries, where it has one that is fixed."""
    found: set[str] = set()
    for member in get_args(union):
        hint = get_type_hints(member).get("type")
        while hint is not None and get_origin(hint) is not Literal:
            hint = next((argument for argument in get_args(hint) if argument is not type(None)), None)
        if hint is not None:
            found.update(get_args(hint))
    return found
