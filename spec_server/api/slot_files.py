"""GET /slot-files, GET and DELETE /slot-files/{name}: what lies in the slot directory, by its footers."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from spec_server.api.jsonio import json_response
from spec_server.engine.base import DEFAULT_OWNER, Engine, SlotFileEntry


async def list_files(http: Request, engine: Engine) -> Response:
    entries = await engine.slot_files(DEFAULT_OWNER)
    return json_response({"object": "list", "data": [entry_json(entry) for entry in entries]})


async def get_file(http: Request, engine: Engine) -> Response:
    return json_response(entry_json(await engine.slot_file(http.path_params["name"], DEFAULT_OWNER)))


async def delete_file(http: Request, engine: Engine) -> Response:
    name = http.path_params["name"]
    await engine.remove_slot_file(name, DEFAULT_OWNER)
    return json_response({"name": name, "deleted": True})


def entry_json(entry: SlotFileEntry) -> dict[str, object]:
    return {
        "name": entry.name,
        "model": entry.model,
        "draft_model": entry.draft_model,
        "n_tokens": entry.n_tokens,
        "n_checkpoints": entry.n_checkpoints,
        "has_draft": entry.has_draft,
        "bytes": entry.n_bytes,
        "modified": entry.modified,
        "fits": not entry.reason,
        "reason": entry.reason,
    }
