"""Names prepared data by what went into it: the bytes of the data, the tokenizer and its template, the settings that
change a row, and the version of our own encoding. The same bytes under another name have the same fingerprint.
"""

import hashlib
import json
from typing import Any

ENCODING_VERSION = 4  # raise it whenever equal inputs would give other rows than before


def fingerprint_of(parts: dict[str, Any]) -> str:
    """32 hexadecimal digits of everything in `parts`, whatever the order of its keys."""
    text = json.dumps({**parts, "encoding": ENCODING_VERSION}, sort_keys=True, ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()[:32]
