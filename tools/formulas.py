"""Render the formulas of the documentation as MathML while MkDocs builds the site.

The finished pages need no script and no network for their formulas.
"""

from __future__ import annotations

import html
import re
from typing import Any

from latex2mathml.converter import convert

FORMULA = re.compile(r'<(span|div) class="arithmatex">\\([(\[])(.*?)\\[)\]]</\1>', re.DOTALL)
# browsers leave no space between such a name and its argument
FUNCTION = re.compile(r"(<mi>(?:log|ln)</mi>)")


def rendered(page: str) -> str:
    """Replace each formula of a page by MathML."""

    def formula(match: re.Match[str]) -> str:
        tag, bracket, latex = match.groups()
        display = "block" if bracket == "[" else "inline"
        mathml = convert(html.unescape(latex).strip(), display=display)
        spaced = FUNCTION.sub(r'\1<mspace width="0.17em"/>', mathml)
        return f'<{tag} class="math">{spaced}</{tag}>'

    return FORMULA.sub(formula, page)


def on_page_content(content: str, **_: Any) -> str:
    """Run for every page of MkDocs."""
    return rendered(content)
