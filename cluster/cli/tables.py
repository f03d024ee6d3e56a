"""Plain text for people: aligned columns, sizes, durations."""

from __future__ import annotations

from collections.abc import Sequence

_GAP = "  "


def format_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns as wide as their widest cell; a column of which every cell is a number is aligned to the right."""
    columns = list(zip(header, *rows, strict=True))
    widths = [max(len(cell) for cell in column) for column in columns]
    numeric = [bool(rows) and all(_is_number(cell) for cell in column[1:]) for column in columns]
    lines = []
    for row in (header, *rows):
        cells = [
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(row, widths, numeric, strict=True)
        ]
        lines.append(_GAP.join(cells).rstrip())
    return "\n".join(lines)


def format_bytes(size_bytes: int) -> str:
    """In powers of 1,024, such as `1.4 MiB`."""
    size = float(size_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size_bytes} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def format_ms(duration_ms: float | None) -> str:
    """`-` for what did not happen."""
    if duration_ms is None:
        return "-"
    return f"{duration_ms:.1f}" if duration_ms < 100 else f"{duration_ms:.0f}"


def _is_number(cell: str) -> bool:
    return cell == "-" or cell.replace(".", "", 1).isdigit()
