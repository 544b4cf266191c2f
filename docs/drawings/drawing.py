"""The pieces of a drawing: boxes, labels and arrows in an SVG."""

from __future__ import annotations

from html import escape
from pathlib import Path

STYLE = """
  text { font: 13px system-ui, sans-serif; fill: #1b1b1f; }
  .small { font-size: 11.5px; fill: #55555f; }
  .title { font-weight: 600; }
  .box { fill: #ffffff; stroke: #6b6b78; stroke-width: 1.2; }
  .blue { fill: #dbe9f6; stroke: #0072b2; }
  .orange { fill: #fdebc8; stroke: #b87400; }
  .green { fill: #d5efe4; stroke: #00785a; }
  .frame { fill: none; stroke: #9a9aa6; stroke-dasharray: 5 4; }
  .arrow { fill: none; stroke: #33333b; stroke-width: 1.4; marker-end: url(#head); }
"""
HEAD = '<marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
HEAD += '<path d="M0 0 8 4 0 8z" fill="#33333b"/></marker>'


class SvgDrawing:
    """A drawing of boxes, labels and arrows."""

    def __init__(self, width: int, height: int, title: str) -> None:
        self._parts = [
            (
                f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}"'
                ' role="img">'
            ),
            f"<title>{escape(title)}</title><style>{STYLE}</style><defs>{HEAD}</defs>",
            f'<rect width="{width}" height="{height}" rx="8" fill="#ffffff"/>',
        ]

    def text(self, x: float, y: float, text: str, kind: str = "", anchor: str = "middle") -> None:
        """Write one line."""
        self._parts.append(
            f'<text x="{x}" y="{y}" text-anchor="{anchor}" class="{kind}">{escape(text)}</text>'
        )

    def box(self, x: float, y: float, width: float, height: float, *lines: str, kind: str = "") -> None:
        """Draw a box.

        Its first line is its title.
        """
        self._parts.append(
            f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="5" class="box {kind}"/>'
        )
        top = y + height / 2 - 8 * (len(lines) - 1) + 5
        for i, line in enumerate(lines):
            self.text(x + width / 2, top + 16 * i, line, "title" if i == 0 else "small")

    def frame(self, x: float, y: float, width: float, height: float, title: str) -> None:
        """Draw a dashed frame with its title at the upper left."""
        self._parts.append(f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="8" class="frame"/>')
        self.text(x + 10, y + 19, title, "small", "start")

    def arrow(self, *points: tuple[float, float], label: str = "", shift: float = -7) -> None:
        """Draw an arrow through the points.

        Its label stands above the middle of its first and last point.
        """
        path = " L".join(f"{x} {y}" for x, y in points)
        self._parts.append(f'<path d="M{path}" class="arrow"/>')
        if label:
            (x0, y0), (x1, y1) = points[0], points[-1]
            self.text((x0 + x1) / 2, (y0 + y1) / 2 + shift, label, "small")

    def save(self, path: Path) -> None:
        """Write the file."""
        path.write_text("\n".join([*self._parts, "</svg>\n"]), encoding="utf-8")
