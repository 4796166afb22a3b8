"""What llama allocates lies in huge pages, where the kernel gives any."""

from __future__ import annotations

import subprocess
import sys

import pytest

from eval.models import target
from spec_server.runtime import huge_pages
from spec_server.runtime.model import Model

pytestmark = pytest.mark.model

# Its own process: whether memory lies in huge pages is told for a process as a whole.
CHILD = """
import sys
from spec_server.runtime.llama_context import LlamaContext
from spec_server.runtime.model import Model
context = LlamaContext(Model(sys.argv[1], n_gpu_layers=0, load_mode=sys.argv[2]), n_ctx=int(sys.argv[3]))
line = next(x for x in open("/proc/self/smaps_rollup") if x.startswith("AnonHugePages:"))
print(int(line.split()[1]) * 1024)
"""


@pytest.fixture(autouse=True)
def _has_huge_pages() -> None:
    if not huge_pages.are_to_be_had():
        pytest.skip("this kernel gives no transparent huge pages")


def bytes_in_huge_pages(load_mode: str, n_ctx: int) -> int:
    command = [sys.executable, "-c", CHILD, str(target()), load_mode, str(n_ctx)]
    return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def test_weights_that_are_copied_lie_in_huge_pages() -> None:
    mapped, copied = bytes_in_huge_pages("mmap", 256), bytes_in_huge_pages("none", 256)
    assert copied - mapped > 0.9 * target().stat().st_size


def test_a_kv_cache_lies_in_huge_pages() -> None:
    with Model(target()) as model:
        n_head_kv, n_head = (int(model.meta(f"llama.attention.head_count{x}") or 0) for x in ("_kv", ""))
        cell = 2 * 2 * model.n_layer * n_head_kv * model.n_embd // n_head  # bytes: K and V of f16
    small, large = bytes_in_huge_pages("mmap", 256), bytes_in_huge_pages("mmap", 8192)
    assert large - small > 0.9 * (8192 - 256) * cell
