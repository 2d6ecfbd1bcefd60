"""Maps stand in an SVG as PNGs of four bytes a pixel: a palette says the same in one.

Only ever the same pixels: an image of more colours than a palette holds stays as it is.
"""

from __future__ import annotations

import base64
import io
import re

import numpy as np

IMAGE = re.compile(r"(?<=data:image/png;base64,)[A-Za-z0-9+/=\s]+")
MOST = 256  # colours of a palette


def with_palettes(svg: str) -> str:
    return IMAGE.sub(lambda found: _smaller(found[0]), svg)


def _smaller(encoded: str) -> str:
    from PIL import Image  # matplotlib needs it too

    with Image.open(io.BytesIO(base64.b64decode(encoded))) as image:
        pixels = np.asarray(image.convert("RGBA"))
    colours, places = np.unique(pixels.reshape(-1, 4), axis=0, return_inverse=True)
    if len(colours) > MOST:
        return encoded
    smaller = Image.fromarray(places.reshape(pixels.shape[:2]).astype(np.uint8), mode="P")
    smaller.putpalette(colours.tobytes(), "RGBA")
    content = io.BytesIO()
    smaller.save(content, "PNG", optimize=True)
    found = base64.b64encode(content.getvalue()).decode()
    return min(encoded, found, key=len)  # a strip of colours gains nothing
