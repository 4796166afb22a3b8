"""FORMAT.md says what the code does: its example, its numbers, its links."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from persistence import format as form
from persistence import llama_state, names
from persistence.format import Kind

TEXT = (Path(form.__file__).parent / "FORMAT.md").read_text()
GOLDEN = Path(__file__).parents[1] / "golden"


def test_the_worked_example_is_the_golden_file() -> None:
    block = TEXT.split("```")[-2]
    data = b""
    for line in block.strip().splitlines():
        if line.startswith("# "):
            continue
        found = re.match(r"([0-9a-f]{4})  ((?:[0-9a-f]{2} ?)+)", line)
        assert found is not None, line
        assert int(found[1], 16) == len(data), line
        data += bytes.fromhex(found[2])
    assert data == (GOLDEN / "v1-full.bin").read_bytes()


@pytest.mark.parametrize(
    "phrase",
    [
        f"at most {form.MAX_SECTIONS} |",
        f"at most {form.MAX_CHECKPOINTS:,} |",
        f"at most {form.MAX_FACTS_BYTES:,} |",
        f"last {form.MAX_FOOTER_BYTES:,} bytes",
        f"1 to {names.MAX_NAME_BYTES} bytes of UTF-8",
        f"number of streams (1 to {llama_state.MAX_STREAMS})",
        f"1 to {llama_state.MAX_LAYERS:,}",
        f"type 0 to {llama_state.MAX_TYPE}",
        f"have version {form.PAYLOAD_VERSION}.",
        f"`{form.PAYLOAD_MAGIC.hex(' ')}`",
        f"`{form.CHECKPOINTS_MAGIC.hex(' ')}`",
        f"`{form.DRAFT_MAGIC.hex(' ')}`",
        f"`{form.FOOTER_MAGIC.decode()}` in ASCII",
        f"`{form.FOOTER_END.decode()}` in ASCII",
        f"{form.SECTION_ENTRY.size} bytes x n_sections",
        f"{form.CHECKPOINT_ENTRY.size} bytes x n_checkpoints",
        ", ".join(f"{kind.value} {kind.label}" for kind in Kind),
    ],
)
def test_the_text_names_the_codes_numbers(phrase: str) -> None:
    assert phrase in TEXT


def test_every_fact_is_described() -> None:
    from persistence.snapshot import FileFacts

    table = TEXT.split("### Facts")[1].split("##")[0]
    described = set(re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE))
    assert described == {name for name in FileFacts.__dataclass_fields__}


def test_the_footer_limit_holds_for_the_largest_footer() -> None:
    assert form.MAX_FOOTER_BYTES < 4096 + 48 * form.MAX_CHECKPOINTS
    fixed = form.MAX_FOOTER_BYTES - form.MAX_CHECKPOINTS * form.CHECKPOINT_ENTRY.size
    assert fixed < 4096


def test_the_links_lead_somewhere() -> None:
    headings = {
        re.sub(r"[^a-z0-9-]", "", line.strip("# \n").lower().replace(" ", "-"))
        for line in TEXT.splitlines()
        if line.startswith("#")
    }
    links = re.findall(r"\]\(#([^)]+)\)", TEXT)
    assert links
    assert set(links) <= headings
