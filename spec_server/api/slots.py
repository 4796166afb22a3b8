"""GET /slots and POST /slots/{id}?action=save|restore|erase."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from spec_server.api.base import ApiOptions
from spec_server.api.ids import number_of
from spec_server.api.jsonio import json_response
from spec_server.api.schemas import SlotFileBody, parse
from spec_server.engine.base import DEFAULT_OWNER, DraftReport, Engine, RestoreResult, SaveResult
from spec_server.engine.errors import InvalidRequest, NotSupported, SlotNotFound, Unavailable

ACTIONS = ("save", "restore", "erase")


async def list_slots(http: Request, engine: Engine, options: ApiOptions) -> Response:
    if not options.slots_endpoint:
        raise NotSupported("this server was started with --no-slots")
    slots = engine.slots()
    if http.query_params.get("fail_on_no_slot") and all(slot.get("is_processing") for slot in slots):
        raise Unavailable("no slot available")
    return json_response(slots)


async def slot_action(http: Request, engine: Engine) -> Response:
    id_slot = _slot_number(http.path_params["id_slot"], engine.n_slots)
    action = http.query_params.get("action")
    if action not in ACTIONS:
        what = "action: missing" if action is None else f"action: unknown: {action!r}"
        raise InvalidRequest(f"{what}; it is one of {', '.join(ACTIONS)}", param="action")
    if action == "erase":
        erased = await engine.erase(id_slot)
        return json_response({"id_slot": erased.id_slot, "n_erased": erased.n_erased})
    filename = parse(SlotFileBody, await http.body()).filename
    if action == "save":
        return json_response(save_json(await engine.save(id_slot, filename, DEFAULT_OWNER)))
    return json_response(restore_json(await engine.restore(id_slot, filename, DEFAULT_OWNER)))


def _slot_number(text: str, n_slots: int) -> int:
    number = number_of(text)
    if number is None:
        raise InvalidRequest(f"id_slot: {text!r} is not a number", param="id_slot")
    if not 0 <= number < n_slots:
        raise SlotNotFound(f"id_slot: no slot {number}; there are {n_slots}, from 0", param="id_slot")
    return number


def save_json(result: SaveResult) -> dict[str, object]:
    return {
        "id_slot": result.id_slot,
        "filename": result.filename,
        "n_saved": result.n_saved,
        "n_written": result.n_written,
        "n_ckpt_saved": result.n_ckpt_saved,
        "target": {"bytes": result.target_bytes},
        "draft": {"saved": result.draft.restored, **_draft_json(result.draft)},
        "timings": {"save_ms": result.save_ms, "hold_ms": result.hold_ms, "sync_ms": result.sync_ms},
    }


def restore_json(result: RestoreResult) -> dict[str, object]:
    return {
        "id_slot": result.id_slot,
        "filename": result.filename,
        "n_restored": result.n_restored,
        "n_read": result.n_read,
        "n_ckpt_restored": result.n_ckpt_restored,
        "n_ckpt_dropped": result.n_ckpt_dropped,
        "n_reusable": result.n_reusable,
        "checksum": result.checksum,
        "target": {"bytes": result.target_bytes},
        "draft": {"restored": result.draft.restored, **_draft_json(result.draft)},
        "notes": result.notes,
        "timings": {"restore_ms": result.restore_ms, "hold_ms": result.hold_ms},
    }


def _draft_json(draft: DraftReport) -> dict[str, object]:
    return {"n_tokens": draft.n_tokens, "bytes": draft.n_bytes, "reason": draft.reason}
