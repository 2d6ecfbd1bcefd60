"""Images inside an SVG with a palette: every pixel as before, in less room."""

from __future__ import annotations

import base64
import io

import numpy as np
import pytest

from airmoe.experiments.report.figures.palettes import IMAGE, MOST, with_palettes

Image = pytest.importorskip("PIL.Image")


def svg_of(*images: np.ndarray) -> str:
    """As matplotlib writes them: RGBA, lines of 76 characters."""
    parts = []
    for pixels in images:
        content = io.BytesIO()
        Image.fromarray(pixels).save(content, "PNG")
        text = base64.encodebytes(content.getvalue()).decode()
        parts.append(f'<image xlink:href="data:image/png;base64,\n{text}" width="5"/>')
    return "<svg>\n" + "\n".join(parts) + "\n</svg>"


def images_of(svg: str) -> list[np.ndarray]:
    return [
        np.asarray(Image.open(io.BytesIO(base64.b64decode(found))).convert("RGBA"))
        for found in IMAGE.findall(svg)
    ]


def pixels(num_colours: int, shape: tuple[int, int], opaque: bool = True) -> np.ndarray:
    random = np.random.default_rng(num_colours)
    colours = random.permutation(256**3)[:num_colours, None] // 256 ** np.arange(3) % 256
    alpha = np.full((num_colours, 1), 255) if opaque else random.integers(0, 256, (num_colours, 1))
    places = np.concatenate(
        [np.arange(num_colours), random.integers(0, num_colours, shape[0] * shape[1] - num_colours)]
    )
    return np.concatenate([colours, alpha], 1)[places].reshape(*shape, 4).astype(np.uint8)


@pytest.mark.parametrize("opaque", [True, False])
@pytest.mark.parametrize("num_colours", [1, 2, 17, 143, MOST])
def test_every_pixel_stays(num_colours: int, opaque: bool) -> None:
    image = pixels(num_colours, (60, 41), opaque)
    (found,) = images_of(with_palettes(svg_of(image)))
    assert np.array_equal(found, image)


def test_a_map_takes_less_than_half_the_room() -> None:
    before = svg_of(pixels(143, (64, 64)), pixels(120, (32, 128)))
    assert len(with_palettes(before)) < len(before) / 2


def test_more_colours_than_a_palette_has_stay_as_they_are() -> None:
    before = svg_of(pixels(MOST + 1, (30, 30)))
    assert with_palettes(before) == before


def test_what_gains_nothing_stays_as_it_is() -> None:
    strip = np.repeat(pixels(200, (1, 200)), 12, axis=0)
    assert with_palettes(svg_of(strip)) == svg_of(strip)


def test_the_rest_of_the_drawing_is_not_touched() -> None:
    before = svg_of(pixels(30, (40, 40)))
    assert IMAGE.sub("", with_palettes(before)) == IMAGE.sub("", before)
