"""The OpenAPI document of the contract, as this relay serves it: the one place its limits stand."""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_FILE = Path(__file__).parent.parent / "openapi.json"
_CUSTOM_AS = "/api/insights/observations"


@dataclass(frozen=True, slots=True)
class Document:
    """The document's text, and what the relay itself reads in it."""

    text: bytes
    batch_max_items: int
    batch_max_bytes: int


def load(custom_paths: Sequence[str]) -> Document:
    """Return the document, with each custom path described as what it is: another insight."""
    document: dict[str, Any] = json.loads(_FILE.read_text(encoding="utf-8"))
    for number, path in enumerate(custom_paths, 1):
        operations = copy.deepcopy(document["paths"][_CUSTOM_AS])
        operations["post"]["operationId"] = f"postCustom{number}"
        operations["post"]["summary"] = "Deliver an event of a custom kind"
        document["paths"][path] = operations
    batch = document["x-outbox"]["batch"]
    return Document(json.dumps(document).encode(), batch["maxItems"], batch["maxBytes"])
