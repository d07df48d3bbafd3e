"""Drawn product pictures: a line icon of the department on a disc, the same for a product every time."""

from __future__ import annotations

import hashlib

__all__ = ["draw"]

_PATHS: dict[str, str] = {
    "shoes": "M8 40c8 0 12-6 16-14l6 5c4 5 12 8 22 9 3 1 4 3 4 7H8zM8 53h48",
    "womens": "M26 8l6 6 6-6 2 14 10 32H14l10-32zM24 24h16",
    "mens": "M22 10L8 18l5 10 6-3v29h26V25l6 3 5-10-14-8c-3 6-17 6-20 0z",
    "kids": "M10 34h20v20H10zM34 34h20v20H34zM22 12h20v20H22z",
    "skincare": "M26 8h12v8H26zM22 16h20v40H22zM22 28h20v16H22z",
    "haircare": "M10 14h44v12H10zM14 26v22M22 26v26M30 26v26M38 26v26M46 26v26M52 26v22",
    "makeup": "M26 30V14l12-6v22zM22 30h20v8H22zM20 38h24v18H20z",
    "grooming": "M18 10h28v12H18zM32 22v8M27 30h10v26H27zM24 10v12M32 10v12M40 10v12",
    "audio": "M12 40v-6a20 20 0 0 1 40 0v6M8 40h10v14H8zM46 40h10v14H46z",
    "computer": "M14 14h36v26H14zM6 46h52l-4 6H10z",
    "phone": "M24 6h16a5 5 0 0 1 5 5v42a5 5 0 0 1-5 5H24a5 5 0 0 1-5-5V11a5 5 0 0 1 5-5zM28 51h8",
    "security": "M8 20h34v16H8zM42 24l14-6v20l-14-6M26 36v14H12",
    "cookware": "M24 20a14 14 0 1 1 0 28 14 14 0 0 1 0-28zM38 34h20M24 27a7 7 0 0 0-7 7",
    "appliances": "M22 8h22l-4 30H26zM24 38h18v8H24zM20 46h26v10H20zM44 14h8v14h-9",
    "drinkware": "M14 20h28v28a6 6 0 0 1-6 6H20a6 6 0 0 1-6-6zM42 26h6a6 6 0 0 1 6 6v4a6 6 0 0 1-6 6h-6",
    "bedding": "M8 14v38M8 44h48v8M8 34h40a8 8 0 0 1 8 8v2M14 24h16v10H14z",
    "bath": "M6 32h52v6a12 12 0 0 1-12 12H18A12 12 0 0 1 6 38zM14 32V16a6 6 0 0 1 12 0M16 50v6M48 50v6",
    "furniture": "M18 8h28v24H18zM14 32h36v8H14zM18 40v16M46 40v16",
    "lighting": "M22 8h20l8 22H14zM32 30v22M20 54h24",
    "decor": "M10 12h44v40H10zM16 18h32v28H16zM16 42l11-13 8 9 6-6 7 8",
    "snacks": "M32 10a22 22 0 1 0 22 24c-6 2-10-2-9-8-7 1-11-5-8-11zM24 26v1M22 40v1M36 44v1M34 30v1",
    "beverages": "M12 28h34v14a12 12 0 0 1-12 12H24a12 12 0 0 1-12-12zM46 32h4a6 6 0 0 1 0 12h-4M24 8v12M34 8v12",
    "pets": "M32 34c9 0 16 10 12 16-3 5-8 2-12 2s-9 3-12-2c-4-6 3-16 12-16zM16 24v6M26 14v8M38 14v8M48 24v6",
    "garden": "M18 40h28l-5 16H23zM32 40V25M32 30c-9 0-15-7-15-15 9 0 15 6 15 15zM32 25c0-9 6-13 15-13 0 9-5 13-15 13",
    "sports": "M20 32h24M12 20h8v24h-8zM44 20h8v24h-8zM6 27v10M58 27v10",
    "camping": "M32 10L6 54h52zM32 10v22M22 54l10-20 10 20",
    "luggage": "M12 22h40v32H12zM23 22v-6a9 9 0 0 1 18 0v6M12 36h40M28 36v6h8v-6",
    "jewelry": "M32 26a15 15 0 1 1 0 30 15 15 0 0 1 0-30zM24 8h16l5 7-13 11-13-11zM19 15h26",
}
_PATHS |= {
    "fashion": _PATHS["mens"],
    "beauty": _PATHS["makeup"],
    "electronics": _PATHS["computer"],
    "grocery": _PATHS["beverages"],
}
_TAG = "M10 10h24l22 22-24 24L10 34zM20 20v1"

_COLOURS: dict[str, str] = {
    "black": "#22252b", "white": "#ffffff", "red": "#d64545", "blue": "#3b6fd4", "green": "#3c9a5f", "teal": "#1f8a8a",
    "pink": "#e884ab", "purple": "#8257c9", "brown": "#8a5a3c", "beige": "#e2d2b4", "orange": "#e98a35",
    "yellow": "#ecc94b", "grey": "#8b93a1", "gray": "#8b93a1", "gold": "#d4a73a", "silver": "#b9c0ca",
    "navy": "#24386b",
}  # fmt: skip


def draw(asin: str, category: str, kind: str, value: str = "") -> str:
    """An SVG picture of a product.

    Args:
        asin: decides the small variations.
        category: the department, which decides the icon; an unknown one shows a price tag.
        kind: the product's kind, which decides the background.
        value: an option value; a colour name in it is the disc's.
    """
    hue = _number(kind or category) % 360
    shift = _number(asin)
    x, y, radius = 20 + shift % 160, 20 + shift // 7 % 160, 70 + shift // 11 % 50
    disc = next((code for name, code in _COLOURS.items() if name in value.lower().split()), f"hsl({hue},60%,97%)")
    ink = "#ffffff" if _is_dark(disc) else f"hsl({hue},34%,26%)"
    path = _PATHS.get(category.lower(), _TAG)
    return (
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 200 200" role="img">'
        f'<defs><linearGradient id="g" x1="0" y1="0" x2="1" y2="1"><stop offset="0" stop-color="hsl({hue},52%,90%)"/>'
        f'<stop offset="1" stop-color="hsl({(hue + 28) % 360},48%,80%)"/></linearGradient></defs>'
        '<rect width="200" height="200" fill="url(#g)"/>'
        f'<circle cx="{x}" cy="{y}" r="{radius}" fill="hsl({(hue + 14) % 360},60%,94%)" opacity="0.55"/>'
        f'<circle cx="100" cy="106" r="64" fill="hsl({hue},40%,40%)" opacity="0.16"/>'
        f'<circle cx="100" cy="100" r="64" fill="{disc}"/>'
        f'<g transform="translate(52 52) scale(1.5)" fill="none" stroke="{ink}" stroke-width="2.4" '
        f'stroke-linejoin="round" stroke-linecap="round"><path d="{path}"/></g></svg>'
    )


def _is_dark(colour: str) -> bool:
    """Whether white lines show better on ``#rrggbb`` than dark ones (ITU-R BT.601 luma below 60 %)."""
    if not colour.startswith("#"):
        return False
    red, green, blue = (int(colour[at : at + 2], 16) for at in (1, 3, 5))
    return 0.299 * red + 0.587 * green + 0.114 * blue < 0.6 * 255


def _number(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest(), "big")
