"""Augmentation of training images against a version written out image by image."""

import numpy as np
import pytest
import torch

from regard import recipes
from regard.training.data import row_generator


def by_hand(image: torch.Tensor, recipe: recipes.ImageClassification, random: np.random.Generator) -> torch.Tensor:
    draws = random.random(5)
    _, height, width = image.shape
    if recipe.flip and draws[0] < 0.5:
        image = image.flip(-1)
    wide = torch.nn.functional.pad(image, [recipe.shift] * 4)
    down, right = (int(draw * (2 * recipe.shift + 1)) for draw in draws[1:3])
    image = wide[:, down : down + height, right : right + width].clone()
    top, left = (int(draw * size) - recipe.cutout // 2 for draw, size in zip(draws[3:], (height, width), strict=True))
    image[:, max(0, top) : top + recipe.cutout, max(0, left) : left + recipe.cutout] = 0
    return image


@pytest.mark.parametrize(
    "options", [{"flip": True}, {"shift": 3}, {"cutout": 4}, {"flip": True, "shift": 2, "cutout": 5}]
)
def test_images_are_mirrored_moved_and_cut(options: dict[str, int]) -> None:
    recipe = recipes.ImageClassification(labels=("a", "b"), mean=(0.0,) * 3, std=(1.0,) * 3, **options)
    images = torch.randint(1, 256, (40, 3, 7, 11), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    rows = [(image, 0, True) for image in images]
    pixels = recipe.batch(rows, [row_generator(5, 0, n) for n in range(40)])["pixel_values"]
    expected = torch.stack([by_hand(image, recipe, row_generator(5, 0, n)) for n, image in enumerate(images)])
    assert torch.equal(pixels, expected.float() / 255)
    assert not torch.equal(expected, images)
    held_out = recipe.batch([(image, 0, False) for image in images], [row_generator(5, 0, n) for n in range(40)])
    assert torch.equal(held_out["pixel_values"], images.float() / 255)


def mixed(images: torch.Tensor, rng: list[np.random.Generator], **options: float) -> dict[str, torch.Tensor]:
    recipe = recipes.ImageClassification(labels=("a", "b", "c"), mean=(0.0,), std=(1.0,), **options)
    return recipe.batch([(image, row % 3, True) for row, image in enumerate(images)], rng)


@pytest.mark.parametrize("alpha", [0.3, 1.0])
def test_cutmix_fills_one_rectangle_with_the_partner_and_shares_the_labels_by_its_area(alpha: float) -> None:
    height, width, rows = 7, 11, 60
    images = torch.arange(rows, dtype=torch.uint8).add(1).reshape(-1, 1, 1, 1).expand(-1, 1, height, width).contiguous()
    batch = mixed(images, [row_generator(3, 0, row) for row in range(rows)], cutmix=alpha)
    shares = []
    for row in range(rows):
        pixels = (batch["pixel_values"][row, 0] * 255).round()
        partner = pixels == images[row - 1, 0, 0, 0]
        assert (partner | (pixels == row + 1)).all()
        down, right = partner.any(1), partner.any(0)
        assert torch.equal(partner, down[:, None] & right)
        share = 1 - partner.float().mean()
        expected = torch.zeros(3)
        expected[row % 3] += share
        expected[(row - 1) % rows % 3] += 1 - share
        torch.testing.assert_close(batch["labels"][row], expected)
        shares.append(float(share))
    assert max(shares) - min(shares) > 0.7


def test_with_mixup_and_cutmix_each_image_draws_one_of_the_two() -> None:
    rows = 60
    images = torch.arange(rows, dtype=torch.uint8).mul(4).reshape(-1, 1, 1, 1).expand(-1, 1, 7, 11).contiguous()
    batch = mixed(images, [row_generator(3, 0, row) for row in range(rows)], cutmix=1.0, mixup=1.0)
    values = [len(image.unique()) for image in batch["pixel_values"]]
    assert set(values) == {1, 2}
    assert 15 < values.count(2) < 45
    torch.testing.assert_close(batch["labels"].sum(1), torch.ones(rows))


def test_a_negative_cutout_is_refused() -> None:
    with pytest.raises(ValueError, match="-1"):
        recipes.ImageClassification(labels=("a",), cutout=-1)
