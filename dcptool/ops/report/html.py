"""The document of a report as one HTML page that loads nothing: a template's files and the data.

Names in a checkpoint are hostile until shown otherwise: they are in the page as JSON in a data block only, with no
character that HTML could take for markup, and the page's own code writes them as text. The policy in the page allows
that code and that style by their hashes, and nothing else; no network at all.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
from collections.abc import Mapping
from importlib.resources import files
from typing import Any

from dcptool.storage import base_name
from dcptool.words import shown

_PLACE = re.compile(r"\{\{(\w+)\}\}")
_FOLDER = "page"
SCRIPTS = ("values.js", "overview.js", "shards.js", "report.js")


def to_html(document: Mapping[str, Any]) -> str:
    """Return the page that shows a document of `dcptool.ops.report.document`."""
    style = _template("report.css")
    script = '"use strict";\n(() => {\n' + "".join(map(_template, SCRIPTS)) + "})();\n"
    filled = {
        "title": html.escape(shown(base_name(str(document["path"])))),
        "policy": _policy(style, script),
        "style": style,
        "script": script,
        "data": embedded(document),
    }
    return _PLACE.sub(lambda found: filled[found[1]], _template("report.html"))


def embedded(document: Any) -> str:
    """Return JSON in ASCII that is safe inside a script element, whatever text is in it.

    >>> embedded({"</script>": "<!--"})
    '{"\\\\u003c/script\\\\u003e":"\\\\u003c!--"}'
    """
    text = json.dumps(document, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    for char in "<>&":  # in JSON these occur inside strings only
        text = text.replace(char, f"\\u{ord(char):04x}")
    return text


def _policy(style: str, script: str) -> str:
    return (
        f"default-src 'none'; script-src '{_hash(script)}'; style-src '{_hash(style)}'; "
        "base-uri 'none'; form-action 'none'"
    )


def _hash(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode('ascii')}"


def _template(name: str) -> str:
    return (files("dcptool.ops.report") / _FOLDER / name).read_text("utf-8")
