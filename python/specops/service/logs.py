# SPDX-License-Identifier: Apache-2.0
"""Log lines on standard error: one format for specops, uvicorn and other libraries."""

import json
import logging
import time
from datetime import datetime, timezone
from typing import Any

FORMATS = ("text", "json")


def configure(level: str, log_format: str = "text") -> None:
    """Write this process's log lines to standard error; no-op if logging is configured already.

    Args:
        level: minimum severity of the lines, such as "info".
        log_format: one of `FORMATS`. A record's attribute `fields`, a dict, becomes members of its
            JSON object; text lines do not show it.
    """
    handler = logging.StreamHandler()
    handler.setFormatter(_JsonLines() if log_format == "json" else _text_lines())
    logging.basicConfig(level=level.upper(), handlers=[handler])
    logging.captureWarnings(True)


def _text_lines() -> logging.Formatter:
    lines = logging.Formatter(
        "%(asctime)s.%(msecs)03dZ %(levelname)s %(name)s: %(message)s", "%Y-%m-%dT%H:%M:%S"
    )
    lines.converter = time.gmtime
    return lines


class _JsonLines(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        """Return the record as a JSON object in one line."""
        when = datetime.fromtimestamp(record.created, timezone.utc)
        line: dict[str, Any] = {
            "time": when.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)
