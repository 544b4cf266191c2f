"""Render the formulas of the documentation as MathML while MkDocs builds the site.

The finished pages need no script and no network for their formulas.
"""

from __future__ import annotations

import html
import re
from typing import Any

from latex2mathml.converter import convert

FORMULA = re.compile(r'<(span|div) class="arithmatex">\\([(\[])(.*?)\\[)\]]</\1>', re.DOTALL)
# browsers leave no space between such a name and its argument, and much space around others
FUNCTION = re.compile(r"(<mi>(?:log|ln)</mi>)")
OPERATOR = re.compile(r"<mo>(?=[a-zA-Z]{2})")
# the sign of a prime is raised already
PRIME = re.compile(r"<msup>(<mi>[^<]*</mi>)<mi>&#x02032;</mi></msup>")
PRIME_OF_INDEXED = re.compile(r"<msubsup>(<mi>[^<]*</mi>)(<mi>[^<]*</mi>)<mi>&#x02032;</mi></msubsup>")
PRIMED = r'<mrow>\1<mo lspace="0" rspace="0">&#x02032;</mo></mrow>'


def rendered(page: str) -> str:
    """Replace each formula of a page by MathML."""

    def formula(match: re.Match[str]) -> str:
        tag, bracket, latex = match.groups()
        display = "block" if bracket == "[" else "inline"
        mathml = convert(html.unescape(latex).strip(), display=display)
        mathml = FUNCTION.sub(r'\1<mspace width="0.17em"/>', mathml)
        mathml = OPERATOR.sub('<mo lspace="0.1em" rspace="0.1em">', mathml)
        mathml = PRIME_OF_INDEXED.sub(rf"<msub>{PRIMED}\2</msub>", PRIME.sub(PRIMED, mathml))
        return f'<{tag} class="math">{mathml}</{tag}>'

    return FORMULA.sub(formula, page)


def on_page_content(content: str, **_: Any) -> str:
    """Run for every page of MkDocs."""
    return rendered(content)
