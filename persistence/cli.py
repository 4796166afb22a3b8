"""The `spec-slots` command: lists, inspects, verifies and rewrites slot files; needs no model and no llama library."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn
from rich.table import Table

from persistence.errors import SlotFileError
from persistence.reader import SlotFile
from persistence.rewrite import rewrite
from persistence.store import DEFAULT_OWNER, DirectoryStore, StoredFile, list_directory

BIG_FILE_BYTES = 64 << 20

app = typer.Typer(
    help="Look at, check and rewrite slot files. No model and no llama library are needed.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
